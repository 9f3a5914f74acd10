"""Which scalars of an event are logged, under which names."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.runtime.observe import WeightsAndBiases, scalars_of
from tests.console.fake_run import step_done


def test_the_parts_of_a_reward_are_scalars_of_their_own() -> None:
    done = step_done(3, 10, reward=0.5)
    rollout = replace(done.rollout, reward_parts={"math": 0.4, "format": 1.0})
    scalars = scalars_of(replace(done, rollout=rollout))
    assert scalars is not None and scalars[0] == 3
    assert scalars[1]["reward/math"] == 0.4 and scalars[1]["reward/format"] == 1.0
    assert scalars[1]["rollout/reward_mean"] == 0.5
    assert all(isinstance(value, float | int) for value in scalars[1].values())


def test_what_engines_guess_is_told_where_they_do() -> None:
    done = step_done(3, 10, reward=0.5)
    guessing = replace(done.rollout, accept_length=1.5, accept_rate=0.25)
    without, scalars = scalars_of(done), scalars_of(replace(done, rollout=guessing))
    assert without is not None and "rollout/accept_length" not in without[1]
    assert scalars is not None and scalars[1]["rollout/accept_length"] == 1.5
    assert scalars[1]["rollout/accept_rate"] == 0.25


def test_each_of_several_adapters_is_a_run_of_its_own_in_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    stand_in = SimpleNamespace(init=lambda **how: begun.append(how))
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for folder in ("both/adapters/sums", "both/adapters/words", "alone"):
        WeightsAndBiases("project", RunDir(tmp_path / folder))
    assert [how["id"] for how in begun] == ["both-sums", "both-words", "alone"]
    assert {how["reinit"] for how in begun} == {"create_new"}
