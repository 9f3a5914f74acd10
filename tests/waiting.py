"""How tests wait: until something is so, within a bound that no busy machine meets. Nothing else
in the tests sleeps (`tests/test_waits.py`)."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
BOUND_S = 300.0
LOOK_EVERY_S = 0.03
PIPE_BYTES = 2**20
"""Of a pipe that is read when its writer has ended: of the usual 64 KiB, a run of 200 steps fills
all, and waits for ever."""


def until(condition: Callable[[], T], what: str = "", *, within_s: float = BOUND_S) -> T:
    """Call `condition` until its result is true, and return that. Fails after `within_s`."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {within_s:.0f} s in vain: {what or condition}"
        time.sleep(LOOK_EVERY_S)
    return found


async def until_async(
    condition: Callable[[], Any], what: str = "", *, within_s: float = BOUND_S
) -> Any:
    """Do the same beside the other tasks of an event loop; `condition` may be a coroutine."""
    deadline = time.monotonic() + within_s
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {within_s:.0f} s in vain: {what or condition}"
        await asyncio.sleep(0.01)


async def settled() -> None:
    """Let every task of the event loop go on until it waits for something outside of the loop."""
    for _ in range(200):
        await asyncio.sleep(0)


def runs(pid: int) -> bool:
    """True if a process is there and no zombie: an init may not reap."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(*pids: int) -> None:
    """Wait until none of the processes runs."""
    until(lambda: not any(map(runs, pids)), f"the end of {pids}")
