"""One driver at a time works on a run; a look at it is no driver."""

from __future__ import annotations

import errno
import fcntl
import threading
from pathlib import Path

import pytest

from milescli.checkpoint import run_lock
from milescli.checkpoint.run_dir import RunDir, is_locked, verdict_file
from milescli.checkpoint.run_lock import lock, state_of
from milescli.core.errors import MachineError, MilesError
from milescli.core.events import PhaseStarted, RunEnded
from milescli.insight.reader import read_history
from tests.fake_run import WrittenRun


def test_one_driver_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "LOCK_WAIT_S", 0.001)
    run = RunDir(tmp_path)
    assert not is_locked(run)
    with run_lock.lock(run):
        assert is_locked(run)
        with pytest.raises(MilesError, match="is running") as refused, run_lock.lock(run):
            pass
        assert any(fix.startswith("miles stop ") for fix in refused.value.fixes)
    assert not is_locked(run)


def test_a_driver_waits_for_whoever_only_looks(tmp_path: Path) -> None:
    file = RunDir(tmp_path).lock_file
    file.touch()
    with open(file) as looked:
        fcntl.flock(looked, fcntl.LOCK_SH)
        ended = threading.Timer(0.1, lambda: fcntl.flock(looked, fcntl.LOCK_UN))
        ended.start()
        with run_lock.lock(RunDir(tmp_path)):
            ended.join()


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(MachineError, match="has no locks"), run_lock.lock(RunDir(tmp_path)):
        pass
    assert not is_locked(RunDir(tmp_path)), "a run that was copied there can be looked at"


@pytest.fixture
def written(tmp_path: Path) -> WrittenRun:
    """Nothing has happened in it yet."""
    return WrittenRun(path=tmp_path / "run")


def test_a_run_runs_while_its_driver_holds_it(written: WrittenRun) -> None:
    attempt = written.attempt(engine_0="")
    with lock(written.run):
        assert state_of(written.run) == "running"
    assert state_of(written.run) == "killed"
    verdict_file(attempt).write_text('{"outcome": "failed"}\n')
    assert state_of(written.run) == "failed"


def test_the_end_of_an_attempt_before_is_not_the_end_of_this_one(written: WrittenRun) -> None:
    """A resumed run holds its directory for a while before it tells of its start."""
    verdict_file(written.attempt(engine_0="")).write_text('{"outcome": "stopped"}\n')
    written.tell(RunEnded(outcome="stopped", step=3, seconds=1.0))
    outcome = read_history(written.run).outcome
    assert state_of(written.run, outcome=outcome) == "stopped"
    written.attempt(engine_0="")
    with lock(written.run):
        assert state_of(written.run, outcome=outcome) == "running"


def test_a_run_of_which_only_events_are_left_ended_as_they_say(written: WrittenRun) -> None:
    assert state_of(written.run, outcome="done") == "done"
    assert state_of(written.run) == "not started"
    written.tell(RunEnded(outcome="done", step=3, seconds=1.0))
    assert state_of(written.run) == "done"
    written.tell(PhaseStarted(phase="start"))  # resumed, and nothing says how that ended
    assert state_of(written.run) == "not started"


def test_an_adapter_is_in_the_state_of_its_run(written: WrittenRun) -> None:
    own = WrittenRun(path=written.run.adapters_dir / "sums")
    written.attempt(engine_0="")
    with lock(written.run):
        assert state_of(own.run) == "running"
    assert state_of(own.run) == "killed"
