"""The agent and the algorithm of docs/examples, as a newcomer runs them."""

from __future__ import annotations

import json

from tests.end_to_end.runs import ROOT, Workplace


def test_an_agent_and_an_algorithm_of_the_users_own_train_and_are_evaluated(
    workplace: Workplace,
) -> None:
    finished = workplace.miles(
        "launch", "--recipe", "tiny.yaml", "--name", "own",
        "--set", "rollout.agent=ask_twice:ask_twice", "--set", "rollout.max_response_tokens=64",
        "--set", "train.objective=rloo_dr_grpo:objective", "--set", "train.steps=2",
        import_from=ROOT / "docs" / "examples",
    )  # fmt: skip
    assert finished.code == 0, finished
    steps = workplace.steps("own")
    assert len(steps) == 2
    for step in steps:
        assert step["report"]["grad_norm"] > 0
        assert step["report"]["logprob_diff_max"] <= 1e-4
    for file in ("rollouts/step_2.jsonl", "eval/step_2.jsonl"):
        rows = (workplace.run("own") / file).read_text().splitlines()
        # one call makes 32 tokens at most
        assert max(len(json.loads(row)["response_ids"]) for row in rows) > 32
