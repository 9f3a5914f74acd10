"""Defines a sandbox: limits, the result of a run, and the protocol of every kind. Runs nothing;
called by rewards, agents and the kinds themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol

Ended = Literal["exited", "timeout", "memory", "output", "killed"]
"""exited: by itself, with any exit code; timeout: its wall or CPU time was over; memory, output: it
used or printed more than the limit; killed: by a signal, or for one of the other limits (see
`RunResult.why`)."""

_MIB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits one run or a whole session, over all its processes."""

    wall_s: float = 10.0
    """Seconds from the first instruction to the end of the last process."""
    cpu_s: float = 10.0
    """Seconds of user and system time together."""
    memory_bytes: int = 512 * _MIB
    """Shared pages count once. One process that asks for much more gets a MemoryError."""
    output_bytes: int = 1 * _MIB
    """Bytes of standard output and error together; in a session, of one cell, unless the call sets
    another limit."""
    file_bytes: int = 64 * _MIB
    """Bytes that may be written to the only writable folder, in at most 4096 files."""
    num_processes: int = 16
    """Largest number of processes at once; threads count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Reports the result of a run, or of a cell of a session."""

    stdout: str
    stderr: str
    exit_code: int | None
    """Exit code; for a cell 0, or 1 if it raised. None if it did not end by itself."""
    ended: Ended
    seconds: float
    """Wall time inside of the sandbox, without its start."""
    is_truncated: bool = False
    """True if output beyond the limit was discarded."""
    why: str = ""
    """The limit that was reached; empty if the code exited by itself."""


class Session(Protocol):
    """Runs cells in a Python interpreter whose variables persist. An async context manager."""

    @property
    def is_open(self) -> bool:
        """Return False after it was closed, or a limit ended it: its variables are gone."""
        ...

    async def execute(
        self, cell: str, *, wall_s: float = 10.0, output_bytes: int | None = None
    ) -> RunResult:
        """Run a cell like a REPL: the value of a last expression is printed if it is not None. A
        cell longer than `wall_s` is interrupted, and the session continues if Python can handle the
        interrupt. Cells of one session run one at a time. Raises MilesError if the session is not
        open."""
        ...

    async def close(self) -> None:
        """End the session with all its processes. Idempotent."""
        ...

    async def __aenter__(self) -> Session: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class Sandbox(Protocol):
    """Runs code in isolation. Safe to use from any event loop and thread."""

    @property
    def kind(self) -> str:
        """Return `bubblewrap`, `landlock` or `remote`."""
        ...

    async def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits = Limits(),  # frozen
    ) -> RunResult:
        """Run `code` as a Python program in a folder with `files` (name -> content). `RunResult`
        reports whatever the program does; raises MilesError only if the sandbox itself fails.
        Cancelling the caller ends the run."""
        ...

    async def open(
        self,
        *,
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits = Limits(),  # frozen
    ) -> Session:
        """Open a session; `limits` apply to all of it. Raises MilesError if none is available."""
        ...

    def close(self) -> None:
        """End everything that runs in it. Idempotent; a later run starts a new one."""
        ...
