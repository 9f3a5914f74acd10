"""What a driver reports to the process that started it, line by line through a pipe: its run, the
processes whose death it noticed, how it ended. Without such a parent it reports nothing; see
`runtime.parent`."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

from milescli.core.errors import shortened


class DriverReport(TypedDict, total=False):
    """Holds what a driver has reported so far; a later report of a key replaces an earlier one."""

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


MAX_LINE_BYTES = 24 * 1024
"""Most bytes of a line. Nobody reads before the driver ends, and the pipe takes 64 KiB: a cause, an
error and the short facts fit."""
_LEAST_CHARS = 64
_PARENT_PIPE: list[int] = []
"""Write end of the pipe to the parent, in a list of at most one; empty in every other process."""


def set_parent_pipe(pipe: int) -> None:
    """Make this process a driver that reports to its parent through `pipe`, a file descriptor."""
    _PARENT_PIPE[:] = [pipe]


def report_to_parent(**facts: Any) -> None:
    """Write facts, by the keys of DriverReport, into the parent's pipe; of long texts, as many
    characters of the beginning and end as fit. Do nothing without a parent. Never raise, and never
    wait for a reader."""
    for pipe in _PARENT_PIPE:
        with suppress(OSError):
            os.write(pipe, _line(facts))


def _line(facts: dict[str, Any]) -> bytes:
    max_chars = MAX_LINE_BYTES
    while True:
        text = json.dumps(_shortened(facts, max_chars), ensure_ascii=False)
        line = text.encode(errors="surrogatepass") + b"\n"
        if len(line) <= MAX_LINE_BYTES or max_chars <= _LEAST_CHARS:
            return line
        max_chars //= 2


def _shortened(fact: Any, max_chars: int) -> Any:
    if isinstance(fact, dict):
        return {key: _shortened(value, max_chars) for key, value in fact.items()}
    if isinstance(fact, list):
        return [_shortened(item, max_chars) for item in fact]
    return shortened(str(fact), max_chars=max_chars) if isinstance(fact, str | Path) else fact


def exit_if_parent_reports() -> None:
    """End this process at once if its parent reports its end: the parent records that the user
    stopped it, and waits until the watchdog has ended everything else. Do nothing without a
    parent."""
    if _PARENT_PIPE:
        os._exit(1)


def read_report(pipe: int) -> DriverReport:
    """Return everything that a driver, which has ended, reported. `pipe` is the read end."""
    os.set_blocking(pipe, False)
    text = b""
    with suppress(BlockingIOError):  # a process that it forked may still hold the other end
        while more := os.read(pipe, 65536):
            text += more
    report = DriverReport()
    for line in text.splitlines():
        with suppress(ValueError):  # the last line may be torn
            report.update(json.loads(line))
    return report
