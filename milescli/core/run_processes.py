"""Finds the processes of a run on this computer, by a variable that all of them inherit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

TOKEN_VARIABLE = "MILES_RUN_TOKEN"
"""Every process of a run inherits it; no other process has its value."""


def processes_of(token: str, *, variable: str = TOKEN_VARIABLE) -> Iterator[int]:
    """Yield the ids of living processes that have the token in this variable. Needs /proc; zombies
    do not count."""
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
    """Return the kernel's letter for the state of a process (R, S, D, Z, T, t); None: it has ended.
    Needs /proc."""
    try:
        return _fields_after_name(pid)[0].decode()
    except OSError:
        return None


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process on this computer so far; 0.0 if it has ended. Needs
    /proc."""
    try:
        fields = _fields_after_name(pid)
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _fields_after_name(pid: int) -> list[bytes]:
    """Return the fields of a process's stat file after its name, which may be any bytes."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


BUSY_SHARE = 0.05
"""Fraction of a core between two looks that counts as busy: a process that waits for others uses
less, and one that computes uses more, even on the busiest useful machine."""


@dataclass(slots=True)
class CpuClock:
    """Decides from the processor time between two looks whether a process computes."""

    _cpu_s: float = float("inf")
    _looked: float = 0.0

    def is_busy(self, cpu_s: float) -> bool:
        """Return True if the process has computed since the last call; False at the first call.
        `cpu_s`: its processor time so far."""
        now = monotonic()
        had_s, passed_s = cpu_s - self._cpu_s, now - self._looked
        self._cpu_s, self._looked = cpu_s, now
        return had_s > BUSY_SHARE * passed_s
