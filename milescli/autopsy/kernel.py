"""What the kernel's log says of processes that were ended for want of memory and of GPUs that
failed, where it may be read."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

LOG = Path("/dev/kmsg")
MAX_LINES = 8
_TELLING = re.compile(
    r"Out of memory|oom-kill|Killed process|NVRM: Xid|NVRM: GPU|amdgpu.*(RAS|[Pp]oison|reset|hang|"
    r"ring .* timeout|page fault)|Machine check|Hardware Error"
)


def kernel_lines(since: float, *, records: list[str] | None = None) -> list[str] | None:
    """Lines of the kernel's log since then (seconds since 1970) that name a cause, each with its
    time; None where this user may not read it. `records`: of the log, for tests."""
    if records is None:
        try:
            records = list(_records())
        except OSError:
            return None
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    lines = []
    for record in records:
        head, _, text = record.partition(";")
        text = text.splitlines()[0] if text else ""
        at = boot + int(head.split(",")[2]) / 1e6
        if at >= since and _TELLING.search(text):
            lines.append(f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ} {text}")
    return lines[:MAX_LINES]


def _records() -> Iterator[str]:
    log = os.open(LOG, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            with suppress(BrokenPipeError):  # overwritten before we came to it
                yield os.read(log, 8192).decode(errors="replace")
    except BlockingIOError:  # the end
        return
    finally:
        os.close(log)
