"""Reinforcement learning from a reward model that another run trained."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.end_to_end.runs import Workplace, actor_of, step_done

SCORED = {
    "model.scratch.vocabulary": "task:sums-mistakes",
    "rollout.reward": "{reward_model: 1.0, format: 0.5}",
    "rollout.reward_model.path": "runs/judge",
    "checkpoint.every": "1",
}


def _launch(name: str, **changes: str) -> list[str]:
    """The command of a run that asks the reward model; `changes`: of SCORED, by last names."""
    by_last = {key.rpartition(".")[2]: key for key in SCORED}
    settings = SCORED | {by_last[last]: value for last, value in changes.items()}
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return ["launch", "--recipe", "tiny.yaml", "--name", name, *sets]


@pytest.fixture(scope="module")
def judge(workplace: Workplace) -> str:
    """The name of a run that trained a reward model."""
    return train_judge(workplace)


def train_judge(workplace: Workplace) -> str:
    """Make that run, unless it is there."""
    if workplace.run("judge").exists():
        return "judge"
    sets = ("train.objective=reward_model", "data.train=task:sums-mistakes", "data.prompts=null")
    sets += ("data.demonstrations=null", "data.eval=null", "warmup.steps=0", "train.batch_size=4")
    sets += ("data.max_row_tokens=96",)
    words = [word for pair in sets for word in ("--set", pair)]
    finished = workplace.miles(
        "launch", "--recipe", "tiny.yaml", "--name", "judge", "--steps", "2", *words
    )
    assert finished.code == 0, finished
    return "judge"


def _reports(workplace: Workplace, name: str) -> list[dict]:
    kept = ("loss", "grad_norm", "num_tokens")
    return [
        {key: event["report"][key] for key in kept}
        for event in workplace.events(name)
        if event["event"] == "StepDone"
    ]


def test_a_policy_gets_the_scores_that_transformers_gives(workplace: Workplace, judge: str) -> None:
    """Of held-out answers, token by token as they were sampled; and a resumed run is the run that
    was not stopped."""
    finished = workplace.miles(*_launch("scored"), "--steps", "3")
    assert finished.code == 0, finished
    _kill_its_scorer(workplace, "scored-stopped", steps="2")
    finished = workplace.miles("resume", "scored-stopped", "--steps", "3")
    assert finished.code == 0, finished
    assert _reports(workplace, "scored-stopped") == _reports(workplace, "scored")

    run = workplace.run("scored")
    rows = [json.loads(line) for line in (run / "eval" / "step_3.jsonl").read_text().splitlines()]
    scores = _scores(next(run.glob("reward-model-*")), rows)
    told = [row["reward_parts"]["reward_model"] for row in rows]
    assert told == pytest.approx(scores, abs=1e-5)
    assert len({round(score, 6) for score in told}) > 1, "all answers have one score"
    for row in rows:
        parts = row["reward_parts"]
        assert row["reward"] == pytest.approx(parts["reward_model"] + 0.5 * parts["format"])


def _kill_its_scorer(workplace: Workplace, name: str, *, steps: str) -> None:
    """Start a run to the end, in which the process that holds the reward model dies."""
    process = workplace.start(*_launch(name), "--steps", steps)
    workplace.wait_for(name, step_done(1), process)
    actor_of(process.pid, "reward-model.log").send_signal(signal.SIGKILL)
    finished = workplace.finish(process)
    assert finished.code == 0, finished
    healed = [event["worker"] for event in workplace.events(name) if "Replaced" in event["event"]]
    assert healed == ["reward model"], finished


def test_what_cannot_score_is_refused_before_anything_starts(
    workplace: Workplace, judge: str
) -> None:
    for changes, told in (
        ({"vocabulary": "null"}, "has another tokenizer than the policy"),
        ({"path": "runs/nobody"}, "the reward model runs/nobody does not exist"),
        ({"path": "null"}, "needs a model"),
    ):
        finished = workplace.miles(*_launch("refused", **changes))
        assert finished.code == 3, finished
        assert told in finished.err
    assert not workplace.run("refused").exists()


def _scores(folder: Path, rows: list[dict]) -> list[float]:
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [
            float(model(torch.tensor([row["prompt_ids"] + row["response_ids"]])).logits[0, 0])
            for row in rows
        ]
