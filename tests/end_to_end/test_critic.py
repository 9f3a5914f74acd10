"""PPO: a critic beside the policy, in a run that is stopped, resumed, laid out otherwise and
exported."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.runs import Workplace

PPO = [
    word
    for pair in (
        "train.algorithm=ppo",
        "train.critic.lr=1e-3",
        "train.critic.warmup_steps=1",
        "train.updates_per_step=2",
        "checkpoint.every=1",
        "eval.num_prompts=4",
    )
    for word in ("--set", pair)
]


def _launch(workplace: Workplace, name: str, *words: str) -> None:
    finished = workplace.miles("launch", "--recipe", "tiny.yaml", "--name", name, *PPO, *words)
    assert finished.code == 0, finished


def _reports(workplace: Workplace, name: str) -> list[dict]:
    kept = ("loss", "grad_norm", "figures", "num_tokens")
    return [
        {key: event["report"][key] for key in kept}
        for event in workplace.events(name)
        if event["event"] == "StepDone"
    ]


@pytest.fixture(scope="module")
def whole(workplace: Workplace) -> list[dict]:
    """What the three steps of the run `ppo` reported."""
    _launch(workplace, "ppo", "--steps", "3")
    return _reports(workplace, "ppo")


def test_a_resumed_run_has_the_critic_that_it_had_and_gives_it_away(
    workplace: Workplace, whole: list[dict]
) -> None:
    values = [report["figures"]["value_loss"] for report in whole]
    assert len(values) == 3
    assert values[2] < values[0], "the critic learns"
    assert whole[0]["grad_norm"] == 0.0, "in its warm-up it learns alone"
    assert whole[1]["grad_norm"] > 0.0

    assert _reports(workplace, workplace.resume_without("ppo", step=3)) == whole

    finished = workplace.miles("export", "ppo", "--role", "critic", "--to", "critic-hf")
    assert finished.code == 0, finished
    folder = workplace.folder / "critic-hf"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    head = load_file(folder / "model.safetensors")["score.weight"]
    start = load_file(workplace.run("ppo") / "critic-model" / "score.safetensors")["score.weight"]
    assert head.shape == start.shape == (1, 64)
    assert not torch.equal(head, start)


def test_ranks_share_a_critic_out_and_it_is_the_same(
    workplace: Workplace, whole: list[dict]
) -> None:
    cut = ["--set", "parallel.tp=2", "--set", "parallel.pp=2"]
    _launch(workplace, "ppo-cut", "--steps", "2", *cut)
    for one, other in zip(whole, _reports(workplace, "ppo-cut"), strict=False):
        for name in ("value_loss", "value_mean", "return_mean", "value_grad_norm"):
            assert other["figures"][name] == pytest.approx(one["figures"][name], abs=2e-5), name
