"""Locks a run for one driver at a time, and says how a run ended. Testing the lock takes it for an
instant; a driver that starts at that moment tries again. The file contains the driver's host and
process id, for processes that find the run locked."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from milescli.checkpoint.run_dir import ADAPTERS, RunDir, is_locked, running_error, take_flock
from milescli.core.errors import MachineError
from milescli.core.files import last_records

LOCK_TRIES, LOCK_WAIT_S = 10, 0.05
"""A driver tries so often, with so many seconds between: longer than any look."""


@contextmanager
def lock(run: RunDir) -> Iterator[None]:
    """Lock a run so that only one driver works on it; taken before anything in its directory
    changes. The lock is also released when the process ends.

    Raises MilesError if another process holds it, or it cannot be written.
    """
    with _opened_lock(run) as file:
        if not _try_lock(file):
            raise running_error(run)
        file.truncate(0)
        file.write(f"{socket.gethostname()} {os.getpid()}\n")
        file.flush()
        yield


def state_of(run: RunDir, *, outcome: str | None = None) -> str:
    """Return not started, running, done, stopped, failed or killed. `outcome`: the outcome in the
    events, for a run whose logs are gone; None: read it there. An adapter's state is that of the
    run that trains it."""
    above = RunDir(run.path.parent.parent)
    if run.path.parent.name == ADAPTERS and above.is_run:
        run = above
    if (verdict := run.verdict()) is not None:
        return str(verdict.get("outcome", "killed"))
    if is_locked(run):
        return "running"
    return outcome or _recorded_outcome(run) or ("killed" if run.attempts() else "not started")


def _recorded_outcome(run: RunDir) -> str | None:
    """Return the outcome of the newest attempt, if the last events report it."""
    for event in last_records(run.events_file):
        if event.get("event") == "RunEnded":
            return str(event.get("outcome", "killed"))
        if event.get("event") == "PhaseStarted" and event.get("phase") == "start":
            return None
    return None


def _try_lock(file: IO[str]) -> bool:
    for look in range(LOCK_TRIES):
        if take_flock(file, fcntl.LOCK_EX):
            return True
        if look < LOCK_TRIES - 1:
            time.sleep(LOCK_WAIT_S)
    return False


def _opened_lock(run: RunDir) -> IO[str]:
    try:
        return open(run.lock_file, "a", encoding="utf-8")
    except OSError as error:
        raise MachineError(
            f"the run directory {run.shown} is not writable",
            why=f"{type(error).__name__}: {error}",
            fix=[
                f"ls -ld {run.typed}   # who owns it?",
                f"df -h {run.typed}   # is it read-only or full?",
            ],
        ) from error
