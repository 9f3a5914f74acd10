"""What a driver reports to the process that started it, line by line through a pipe: its run, the
processes that it saw die, how it ended. Without such a parent nobody listens; see `runtime.parent`.
Standard library only."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict


class Said(TypedDict, total=False):
    """What a driver has reported so far; a later report of a key replaces an earlier one."""

    run: str
    """Directory of the run."""
    token: str
    """Token that identifies the processes of the run."""
    scratch_dir: str
    """Folder that the watchdog removes at the end."""
    log_dir: str
    """Log directory of the attempt."""
    ray_log: str
    """File with what Ray printed, while the driver starts it; empty afterwards."""
    max_restarts: int
    """`fault.max_restarts` of the run."""
    window_s: float
    """`fault.window_s` of the run."""
    cause: dict[str, Any]
    """MilesError.as_dict() of an error that must end the driver, reported as soon as it occurred.
    """
    error: dict[str, Any]
    """MilesError.as_dict() of the error that ended it, which the user saw."""
    code: int
    """Exit code of a driver that ended normally."""


_LISTENER: list[int] = []
"""Write end of the pipe, only in the driver."""


def speak_into(pipe: int) -> None:
    """Make this process a driver that reports to its parent through `pipe`."""
    _LISTENER[:] = [pipe]


def say(**facts: Any) -> None:
    """Report facts by the keys of Said. Never raises and never waits: nobody reads before the
    end."""
    text = {key: str(fact) if isinstance(fact, Path) else fact for key, fact in facts.items()}
    for pipe in _LISTENER:
        with suppress(OSError):
            os.write(pipe, json.dumps(text).encode() + b"\n")


def leave() -> None:
    """End this process at once if its parent reports for it: the parent writes down that the user
    stopped it, and waits until the watchdog has ended everything else. Otherwise do nothing."""
    if _LISTENER:
        os._exit(1)


def heard(pipe: int) -> Said:
    """Read everything that a driver, which has ended, reported through `pipe`, its read end."""
    os.set_blocking(pipe, False)
    text = b""
    with suppress(BlockingIOError):  # a process that it forked may still hold the other end
        while more := os.read(pipe, 65536):
            text += more
    said = Said()
    for line in text.splitlines():
        with suppress(ValueError):  # the last line may be torn
            said.update(json.loads(line))
    return said
