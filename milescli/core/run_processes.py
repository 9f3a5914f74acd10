"""Which processes of this computer belong to a run: by a variable that all of them inherit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

TOKEN_VARIABLE = "MILES_RUN_TOKEN"
"""Every process of a run inherits it; no other process has its value."""


def processes_of(token: str, *, variable: str = TOKEN_VARIABLE) -> Iterator[int]:
    """Ids of living processes that carry the token, in this variable. Needs /proc; zombies do not
    count."""
    mark = f"{variable}={token}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            carries = mark in (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended while we looked, or is not ours to read
            continue
        if carries and state_of(int(entry.name)) not in (None, "Z"):
            yield int(entry.name)


def state_of(pid: int) -> str | None:
    """The letter by which the kernel says what a process does (R, S, D, Z, T, t); None: it has
    ended. Needs /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None
