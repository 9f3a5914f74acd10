"""Phases of steps follow one another, and fill the step; what is beside them has its own times."""

from __future__ import annotations

from itertools import pairwise

import pytest

from milescli.insight.timeline import beside_steps, of_run, of_steps
from tests.insight.planted import Planted


def test_the_phases_of_a_step_follow_one_another_and_fill_it() -> None:
    history = Planted(steps=5).history()
    intervals = of_steps(history, first=2, last=3)
    assert {one.step for one in intervals} == {2, 3}
    for step in (2, 3):
        own = [one for one in intervals if one.step == step]
        assert [one.what for one in own] == ["rollout", "pack", "train", "publish"]
        for before, after in pairwise(own):
            assert before.end_s == after.begin_s
        end = history.columns.times[step - 1]
        assert own[-1].end_s == pytest.approx(end, abs=0.01)


def test_a_run_is_in_one_phase_after_the_other_and_goes_back_after_an_evaluation() -> None:
    history = Planted(steps=20).history()
    spans = of_run(history)
    assert {one.what for one in spans} <= {"start", "train", "eval"}
    for before, after in pairwise(spans):
        assert before.end_s <= after.begin_s
    told = {"event": "PhaseStarted", "detail": "", "time": "2026-01-01T00:00:00Z"}
    history.feed({**told, "phase": "train", "detail": "steps"})
    history.feed({**told, "phase": "eval"})
    assert history.phase == "eval"
    done = {"accuracy": 1.0, "num_prompts": 1, "seconds": 1.0}
    history.feed({"event": "EvalDone", "step": 20, "time": "2026-01-01T00:00:09Z", **done})
    assert (history.phase, history.phase_detail) == ("train", "steps")
    last = history.spans[-1]
    assert (last.phase, last.end_s - last.begin_s) == ("eval", 9.0)


def test_a_run_leaves_a_validation_and_the_evaluation_that_follows_at_once() -> None:
    history = Planted(steps=20).history()
    told = {"time": "2026-01-01T00:00:00Z", "step": 20, "seconds": 1.0}
    began = {**told, "event": "PhaseStarted", "detail": "", "phase": "eval"}
    history.feed({**began, "phase": "train", "detail": "steps"})
    history.feed(began)
    history.feed(began)
    history.feed({**told, "event": "ValidationDone", "loss": 1.0})
    assert (history.phase, history.phase_detail) == ("train", "steps")
    assert history.validations[-1].seconds == 1.0
    history.feed(began)
    history.feed({**told, "event": "EvalDone", "accuracy": 1.0, "num_prompts": 1})
    assert (history.phase, history.phase_detail) == ("train", "steps")


def test_evaluations_and_healings_lie_beside_the_steps() -> None:
    beside = list(beside_steps(Planted(steps=20, lost=(7,)).history()))
    assert [one.step for one in beside if one.actor == "evaluation"] == [0, 10, 20]
    lost = next(one for one in beside if one.actor == "engine 1")
    assert lost.step == 7 and lost.end_s >= lost.begin_s
