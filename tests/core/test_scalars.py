"""Which scalars of an event are logged, under which names."""

from __future__ import annotations

import json
from dataclasses import replace

from milescli.core.events import AdapterEvent, PhaseStarted, RowStepDone, to_record
from milescli.core.scalars import figures_below, objective_figures, scalars_in, scalars_of
from tests.fake_run import report, step_done


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


def test_a_line_of_the_log_has_the_scalars_of_its_event() -> None:
    done = step_done(3, 10, reward=0.5)
    assert scalars_in(json.loads(json.dumps(to_record(done)))) == scalars_of(done)


def test_what_an_adapter_does_is_no_scalar_of_the_run_that_trains_it() -> None:
    of_adapter = AdapterEvent(adapter="sums", event=step_done(3, 10, reward=0.5))
    assert scalars_of(of_adapter) is None
    assert scalars_in(to_record(of_adapter)) == scalars_of(of_adapter.event)


def test_nobody_differs_about_tokens_that_nobody_sampled() -> None:
    done = RowStepDone(
        step=2,
        num_steps=4,
        epoch=0.5,
        report=report(loss=1.0),
        pack_s=0.1,
        train_s=1.0,
        save_s=0.0,
        step_s=1.1,
        tokens_per_s=100.0,
    )
    scalars = scalars_of(done)
    assert scalars is not None and scalars[1]["train/epoch"] == 0.5
    assert not [name for name in scalars[1] if "logprob_diff" in name]


def test_a_phase_has_none() -> None:
    assert scalars_of(PhaseStarted(phase="train")) is None


def test_figures_of_an_objective_and_of_a_section_are_told_apart_from_others() -> None:
    done = step_done(3, 10, reward=0.5)
    scalars = scalars_of(replace(done, rollout=replace(done.rollout, reward_parts={"math": 0.4})))
    assert scalars is not None
    assert objective_figures(scalars[1]) == dict(done.report.figures)
    assert figures_below(scalars[1], "reward") == {"math": 0.4}
    assert figures_below(scalars[1], "time")["step_s"] == done.seconds.step_s
