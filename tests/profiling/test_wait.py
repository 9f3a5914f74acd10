"""Waiting for a profile: who is waited for, and what is said where it never comes."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir, verdict_file
from milescli.checkpoint.run_lock import lock
from milescli.core.errors import MilesError, RecipeError, WaitTimeout
from milescli.profiling import request as files
from milescli.profiling import wait
from milescli.profiling.request import Progress, Request, State
from tests.backends.megatron.harness import plan_of
from tests.waiting import until


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunDir]:
    """A run that a driver holds, in its third step."""
    run = RunDir(tmp_path)
    run.recipe_file.write_text("")
    run.plan_file.write_text(plan_of({"dp": 2}).to_json())
    step = {"event": "StepDone", "step": 2, "num_steps": 9, "seconds": {"step_s": 1.5}}
    run.events_file.write_text(json.dumps(step) + "\n")
    run.new_attempt()
    with lock(run):
        yield run


def _wanted(run: RunDir) -> Request:
    return Request(number=files.next_number(run), steps=2, ranks=[0])


def _answer(run: RunDir, progress: Progress) -> threading.Thread:
    """As a driver does, a moment later."""

    def answer() -> None:
        wanted = until(lambda: files.take_request(run))
        state = State(progress=progress, first_step=3, last_step=4, seconds=3.0)
        files.write_state(run, wanted.number, state)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_the_state_that_the_driver_writes_is_waited_for(running: RunDir) -> None:
    wait.require_running(running, command="miles profile x")
    told = list[str]()
    driver = _answer(running, Progress.DONE)
    state = wait.request_profile(running, _wanted(running), tell=told.append)
    driver.join()
    assert (state.first_step, state.last_step) == (3, 4)
    assert "step 2, which took 1.5 s" in told[0]


def test_an_attempt_that_goes_wrong_is_an_error(running: RunDir) -> None:
    driver = _answer(running, Progress.ENDED)
    with pytest.raises(MilesError, match="ended before the profile was finished") as ended:
        wait.request_profile(running, _wanted(running), tell=lambda text: None)
    driver.join()
    assert ended.value.exit_code == 1 and "miles why" in ended.value.fixes[0]


def test_a_driver_that_is_gone_is_an_error_and_the_request_is_taken_back(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    wanted = _wanted(run)
    with pytest.raises(MilesError, match="ended before") as ended:
        wait.request_profile(run, wanted, tell=lambda text: None)
    assert "driver is no longer running" in ended.value.why
    assert not files.is_pending(run) and files.is_cancelled(run, wanted.number)


def test_a_driver_that_says_nothing_is_named_with_the_bound(
    running: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "MIN_BOUND_S", 0.5)
    monkeypatch.setattr(wait, "STEPS_OF_SILENCE", 0.1)
    long_ago = time.time() - 1000
    os.utime(running.events_file, (long_ago, long_ago))
    with pytest.raises(WaitTimeout, match="for the driver of") as silent:
        wait.request_profile(running, _wanted(running), tell=lambda text: None)
    assert "it last did step 2" in silent.value.why and "limit is" in silent.value.why
    assert not files.is_pending(running)


def test_a_driver_that_goes_on_without_heeding_the_request_is_an_error(running: RunDir) -> None:
    def steps_are_done(text: str) -> None:
        with running.events_file.open("a") as events:
            for step in range(3, 4 + wait.SPARE_STEPS):
                events.write(json.dumps({"event": "StepDone", "step": step}) + "\n")

    with pytest.raises(MilesError, match="does not record profiles") as refused:
        wait.request_profile(running, _wanted(running), tell=steps_are_done)
    assert refused.value.exit_code == 1 and not files.is_pending(running)


def test_ctrl_c_takes_the_request_back(running: RunDir) -> None:
    wanted = _wanted(running)

    def interrupted(text: str) -> None:
        assert files.is_pending(running)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait.request_profile(running, wanted, tell=interrupted)
    assert not files.is_pending(running) and files.is_cancelled(running, wanted.number)


def test_ranks_and_engines_that_are_not_there_are_refused(running: RunDir) -> None:
    plan = wait.plan_of(running)
    wait.check(running, plan, ranks=[0, 1], engines=[])
    with pytest.raises(RecipeError, match="no trainer rank 2") as refused:
        wait.check(running, plan, ranks=[0, 2], engines=[])
    assert "0 to 1" in refused.value.why
    with pytest.raises(RecipeError, match="no engine 7"):
        wait.check(running, plan, ranks=[], engines=[7])


@pytest.mark.parametrize("outcome", ["done", "failed"])
def test_a_run_that_does_not_run_is_refused(running: RunDir, outcome: str) -> None:
    verdict_file(running.attempts()[-1]).write_text(json.dumps({"outcome": outcome}))
    with pytest.raises(MilesError, match="is not running") as refused:
        wait.require_running(running, command="miles profile x")
    assert outcome in refused.value.why and "miles resume" in refused.value.fixes[0]


def test_a_run_that_was_killed_is_said_to_be(running: RunDir) -> None:
    running.lock_file.unlink()
    with pytest.raises(MilesError, match="is not running") as refused:
        wait.require_running(running, command="miles profile x")
    assert refused.value.why.endswith("killed")


def test_the_end_of_long_events_is_enough(running: RunDir) -> None:
    with running.events_file.open("a") as events:
        row = {"event": "RowStepDone", "step": 3, "num_steps": 9, "step_s": 0.25}
        events.write("x" * 2**18 + "\n" + json.dumps(row) + "\n{torn")
    seen = wait.pace(running)
    assert (seen.step, seen.step_s) == (3, 0.25)
