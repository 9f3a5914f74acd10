"""After a driver that died: its watchdog ends what it left, and where that died too, another
does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from milescli.cluster.watchdog import (
    KILL_GRACE_S,
    TERM_GRACE_S,
    WATCHED_VARIABLE,
    clean_up_instead,
    is_on_duty,
)
from milescli.core.errors import MachineError
from milescli.core.run_processes import processes_of

CLEAN_UP_S = TERM_GRACE_S + KILL_GRACE_S + 5.0
"""For the watchdog to end what a dead driver left."""


def watchdog_on_duty(token: str) -> bool:
    """Whether one lives, and is not held, that watches the processes with this token."""
    return any(map(is_on_duty, processes_of(token, variable=WATCHED_VARIABLE)))


def wait_for_clean_up(
    *, token: str, scratch_dirs: Sequence[Path] = (), verdict: Path | None = None
) -> None:
    """Until no process with the token, none of the folders, and a verdict is there. Raises
    MachineError where processes are left."""
    deadline = time.monotonic() + CLEAN_UP_S
    while time.monotonic() < deadline:
        is_left = any(processes_of(token)) or any(folder.exists() for folder in scratch_dirs)
        if not is_left and (verdict is None or verdict.exists()):
            return
        if not watchdog_on_duty(token):
            with suppress(TimeoutError):  # what is left is told below
                clean_up_instead(token=token, scratch_dirs=[*scratch_dirs], verdict=verdict)
            break
        time.sleep(0.1)
    if left := list(processes_of(token)):
        raise MachineError(
            "the driver died, and processes of its run are still there",
            why=f"its watchdog was to end them within {CLEAN_UP_S:.0f} s; left are "
            f"{', '.join(map(str, left))}",
            fix=f"kill -9 {' '.join(map(str, left))}",
        )
