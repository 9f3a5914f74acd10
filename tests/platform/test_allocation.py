"""Memory that a process keeps for its next tensors, and gives back. In a process of its own: what
is set cannot be taken back."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """\
import psutil, torch
from milescli.platform.allocation import release_freed_memory, keep_freed_memory
keep_freed_memory()
blocks = [torch.ones(1 << 23) for _ in range(16)]
last = torch.ones(1000)
held = psutil.Process().memory_info().rss
del blocks
kept = psutil.Process().memory_info().rss
release_freed_memory()
print(held - kept, kept - psutil.Process().memory_info().rss)
"""
BLOCKS_BYTES = 16 * (1 << 25)


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=400, check=True
    ).stdout
    at_once, later = map(int, out.split())
    assert at_once < BLOCKS_BYTES / 2 < later
