"""Memory that this process held: of tests that measure it."""

from __future__ import annotations

import re
from pathlib import Path


def peak_bytes() -> int:
    """Return the most that this process was resident with, since it began or `reset_peak_memory`.
    (Python's `ru_maxrss` also counts what its parent had when it started it.)"""
    return _held("VmHWM")


def resident_bytes() -> int:
    """Return what this process is resident with now."""
    return _held("VmRSS")


def reset_peak_memory() -> None:
    """Count the peak from here on."""
    Path("/proc/self/clear_refs").write_text("5")


def _held(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)[1])
