"""A run that its user stops before an attempt can handle signals is `stopped`, and can go on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir, verdict_file
from milescli.checkpoint.run_lock import state_of
from milescli.core.errors import ExitCode, Interrupted, RecipeError, Terminated
from milescli.runtime.recovery.stops import check_stopped, recording_stop

TERM = SystemExit(ExitCode.TERMINATED)


@pytest.fixture(autouse=True)
def hangup() -> Iterator[None]:
    """SIGHUP is heard, also where pytest runs below `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "mine")
    run.path.mkdir()
    run.recipe_file.touch()
    return run


@pytest.mark.parametrize(
    ("raised", "kind"), [(KeyboardInterrupt(), Interrupted), (TERM, Terminated)]
)
@pytest.mark.parametrize("began", [False, True])
def test_its_state_is_stopped_and_the_error_says_what_resume_does(
    run: RunDir, raised: BaseException, kind: type, began: bool
) -> None:
    verdict_file(run.new_attempt()).write_text('{"outcome": "failed"}')
    with pytest.raises(kind) as caught, recording_stop(run, num_steps=9):
        if began:
            run.new_attempt()
        raise raised
    assert caught.value.fixes == [
        f"miles resume {run.shown}   # starts from the beginning: it had saved nothing"
    ]
    assert state_of(run) == "stopped" and len(run.attempts()) == 2
    last = json.loads(run.events_file.read_text().splitlines()[-1])
    assert (last["event"], last["outcome"]) == ("RunEnded", "stopped")


def test_what_an_attempt_has_written_of_its_end_stays(run: RunDir) -> None:
    with pytest.raises(Interrupted), recording_stop(run, num_steps=9):
        verdict_file(run.new_attempt()).write_text('{"outcome": "done"}')
        raise KeyboardInterrupt
    assert state_of(run) == "done" and not run.events_file.exists()


@pytest.mark.parametrize("error", [RecipeError("a", why="b", fix="c"), SystemExit(3)])
def test_any_other_end_is_none_of_the_users(run: RunDir, error: BaseException) -> None:
    with pytest.raises(type(error)), recording_stop(run, num_steps=9):
        raise error
    assert state_of(run) == "not started"


def test_a_directory_without_a_recipe_is_not_left_behind(run: RunDir) -> None:
    run.recipe_file.unlink()
    with pytest.raises(KeyboardInterrupt), recording_stop(run, num_steps=9):
        raise KeyboardInterrupt
    assert not run.path.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_a_library_swallows_is_raised_again(run: RunDir, number: int) -> None:
    with pytest.raises((Interrupted, Terminated)), recording_stop(run, num_steps=9):
        with suppress(BaseException):
            os.kill(os.getpid(), number)
            pytest.fail("the signal was not heard")
        check_stopped()
    assert state_of(run) == "stopped"
    check_stopped()  # and not once more


def test_a_closed_terminal_stops_once_however_often_it_says_so(run: RunDir) -> None:
    heard = []
    with pytest.raises(Terminated) as caught, recording_stop(run, num_steps=9):
        try:
            os.kill(os.getpid(), signal.SIGHUP)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            heard.append("cleaned up")
    assert heard and "SIGHUP" in caught.value.why


def test_a_command_under_nohup_goes_on(run: RunDir) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with recording_stop(run, num_steps=9):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert state_of(run) == "not started"
