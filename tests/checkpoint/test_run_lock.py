"""One driver at a time works on a run; a look at it is no driver."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from milescli.checkpoint import run_lock
from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import MilesError


def test_one_driver_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "LOOK_S", 0.001)
    run = RunDir(tmp_path)
    assert not run_lock.is_locked(run)
    with run_lock.lock(run):
        assert run_lock.is_locked(run)
        with pytest.raises(MilesError, match="is in use"), run_lock.lock(run):
            pass
    assert not run_lock.is_locked(run)


def test_a_driver_waits_for_whoever_only_looks(tmp_path: Path) -> None:
    (tmp_path / run_lock.FILE).touch()
    with open(tmp_path / run_lock.FILE) as looked:
        fcntl.flock(looked, fcntl.LOCK_SH)
        ended = threading.Timer(0.1, lambda: fcntl.flock(looked, fcntl.LOCK_UN))
        ended.start()
        with run_lock.lock(RunDir(tmp_path)):
            ended.join()
