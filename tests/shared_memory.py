"""What lies in /dev/shm, and what of it nobody holds any more. Tests of other rooms may run beside:
what theirs hold is no leftover."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from tests.waiting import until

FOLDER = Path("/dev/shm")
GONE_WITHIN_S = 60.0
"""What another run's processes held that have just ended, until its watchdog takes it away; and a
semaphore, by whose name nobody holds it: Python takes that away when it has opened it."""


def entries() -> set[str]:
    """Names of all that lies there now."""
    return {entry.name for entry in FOLDER.iterdir()}


def forgotten(before: set[str]) -> set[str]:
    """New since `before` and there to stay, though no living process has it open, has it mapped, or
    is named by it (`torch_PID_...`)."""
    new = entries() - before
    alive = {entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    named = {name for name in new if alive & set(re.split(r"[_-]", name))}
    idle = {name for name in new - named if not any(_holds(pid, name) for pid in alive)}
    with contextlib.suppress(AssertionError):
        until(lambda: not _there(idle), within_s=GONE_WITHIN_S)
    return _there(idle)


def _there(names: set[str]) -> set[str]:
    return {name for name in names if (FOLDER / name).exists()}


def _holds(pid: str, name: str) -> bool:
    path = str(FOLDER / name)
    try:
        if path in Path(f"/proc/{pid}/maps").read_text():
            return True
        return any(os.readlink(link) == path for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it ended while we looked
        return False
