"""PPO: a critic beside the policy, in a run that is stopped, resumed, laid out otherwise and
exported."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.conftest import PPO_OF_DIALOGUES
from tests.end_to_end.runs import Workplace


def _reports(workplace: Workplace, name: str) -> list[dict]:
    kept = ("loss", "grad_norm", "figures", "num_tokens")
    return [
        {key: event["report"][key] for key in kept}
        for event in workplace.events(name)
        if event["event"] == "StepDone"
    ]


def test_a_resumed_run_has_the_critic_that_it_had_and_gives_it_away(
    workplace: Workplace, ppo: str, ppo_again: str
) -> None:
    whole = _reports(workplace, ppo)
    values = [report["figures"]["value_loss"] for report in whole]
    assert len(values) == 3
    assert values[2] < values[0], "the critic learns"
    assert whole[0]["grad_norm"] == 0.0, "in its warm-up it learns alone"
    assert whole[1]["grad_norm"] > 0.0

    assert _reports(workplace, ppo_again) == whole

    finished = workplace.miles("export", "ppo", "--role", "critic", "--to", "critic-hf")
    assert finished.code == 0, finished
    folder = workplace.folder / "critic-hf"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    head = load_file(folder / "model.safetensors")["score.weight"]
    start = load_file(workplace.run("ppo") / "critic-model" / "score.safetensors")["score.weight"]
    assert head.shape == start.shape == (1, 64)
    assert not torch.equal(head, start)


def test_ranks_share_a_critic_out_and_it_is_the_same(workplace: Workplace, ppo: str) -> None:
    sets = (*PPO_OF_DIALOGUES, "parallel.tp=2", "parallel.pp=2")
    words = [word for setting in sets for word in ("--set", setting)]
    launch = ("launch", "--recipe", "tiny.yaml", "--name", "ppo-cut", "--steps", "2")
    finished = workplace.miles(*launch, *words)
    assert finished.code == 0, finished
    for one, other in zip(_reports(workplace, ppo), _reports(workplace, "ppo-cut"), strict=False):
        for name in ("value_loss", "value_mean", "return_mean", "value_grad_norm"):
            assert other["figures"][name] == pytest.approx(one["figures"][name], abs=2e-5), name
