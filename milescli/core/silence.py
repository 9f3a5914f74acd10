"""Detects processes that do not respond for too long; dumps the stacks of their threads before they
are killed; recognises errors that are only consequences of the loss of another process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from milescli.core.events import WorkerSilent
from milescli.core.run_processes import state_of

WARNING_SHARE = 1 / 3
"""Fraction of the bound after which the user is notified."""
BUSY_TIMES = 2.0
"""Multiple of the bound for a process that may be busy: the system runs it, but it does not answer.
"""
_MAX_COUNTED_S = 15.0
"""Most seconds counted between two looks: after a longer pause, this process itself did not run
(Ctrl-Z)."""


@dataclass(slots=True, kw_only=True)
class Silence:
    """Measures how long one worker has not responded."""

    worker: str
    """Its name in errors: engine 1."""
    bound_s: float
    """`machine.silence_s`."""
    seconds: float = 0.0
    """How long it has not responded."""
    longest_s: float = 0.0
    """The longest silence after which it responded again: a silence of this length is normal."""
    reason: str = ""
    """The symptom that was observed."""
    _times: float = 1.0
    """Factor by which the bound is multiplied."""
    _is_shown: bool = False
    _looked: float = field(default_factory=lambda: monotonic())

    def observe(self, reason: str | None, *, times: float = 1.0) -> None:
        """Record a check. `reason` says why the process seems to hang; None means that it responds.
        `times` multiplies the bound for this reason."""
        now = monotonic()
        if reason is None:
            self.longest_s = max(self.longest_s, self.seconds)
            self.seconds, self.reason, self._is_shown = 0.0, "", False
        else:
            self.seconds += min(now - self._looked, _MAX_COUNTED_S)
            self.reason = reason
        self._looked, self._times = now, times

    @property
    def limit_s(self) -> float:
        """Return the seconds of silence beyond which the worker counts as hung."""
        return self._times * self.bound_s + self.longest_s

    @property
    def is_too_long(self) -> bool:
        """Return True if the worker counts as hung."""
        return self.seconds >= self.limit_s

    def warning(self, step: int) -> WorkerSilent | None:
        """Return a warning event, once per silence, when a third of the bound has passed; else
        None. `step`: number of steps done."""
        if self._is_shown or self.seconds < WARNING_SHARE * self.bound_s + self.longest_s:
            return None
        self._is_shown = True
        return WorkerSilent(
            worker=self.worker,
            why=self.reason,
            step=step,
            seconds=self.seconds,
            limit_s=self.limit_s,
        )


DUMP_TIMEOUT_S = 10.0
"""Time for py-spy to read one process."""


def dump_stacks(pids: Mapping[str, int], file: Path) -> str | None:
    """Append the stacks of these processes, each after its name. Return the file's path, or None if
    no stack could be read."""
    if (tool := py_spy()) is None:
        return None
    dumps = list[str]()
    for name, pid in pids.items():
        # a stopped process cannot be made to wait for the look at it
        command = [tool, "dump", "--nonblocking", "--pid", str(pid)]
        try:
            dumped = subprocess.run(
                command, capture_output=True, text=True, timeout=DUMP_TIMEOUT_S, check=False
            )
        except (subprocess.TimeoutExpired, OSError):
            continue
        if dumped.returncode == 0:
            dumps.append(f"== {name}, process {pid}\n{dumped.stdout}")
    if not dumps:
        return None
    with file.open("a", encoding="utf-8") as stacks:
        stacks.write("\n".join(dumps) + "\n")
    return str(file)


def py_spy() -> str | None:
    """Return the path of py-spy, next to this Python or on PATH."""
    return shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")


def is_stopped_process(pid: int) -> bool:
    """Return True if the process is stopped, by SIGSTOP or by a debugger."""
    return state_of(pid) in ("T", "t")


_PEER_LOSS_PHRASES = (
    "closed by peer",
    "reset by peer",
    "connection closed",
    "connection reset",
    "broken pipe",
    "timed out",
    "timeout",
    "gloo",
    "nccl",
)
"""Phrases in messages of gloo, NCCL and sockets after the loss of a peer, in lower case."""


def sounds_like_lost_peer(text: str) -> bool:
    """Return True if an error with this text may be a consequence of the loss of another
    process."""
    lowered = text.lower()
    return any(mark in lowered for mark in _PEER_LOSS_PHRASES)
