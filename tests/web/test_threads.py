"""So many calls at once, each with a bound."""

from __future__ import annotations

import asyncio
import threading

import pytest

from milescli.web.refusals import Busy
from milescli.web.threads import Threads


def test_no_more_run_than_may() -> None:
    running, most, lock, full = 0, 0, threading.Lock(), threading.Barrier(3)

    def call() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        full.wait(60.0)
        threading.Event().wait(0.02)  # time for one too many
        with lock:
            running -= 1

    async def all_of_them() -> None:
        threads = Threads(3, what="test")
        await asyncio.gather(*(threads.run(call) for _ in range(12)))

    asyncio.run(all_of_them())
    assert most == 3


def test_one_that_hangs_is_left_behind_and_counts_until_it_ends() -> None:
    ends = threading.Event()

    async def asked() -> None:
        threads = Threads(1, what="read", wait_s=0.05)
        with pytest.raises(Busy, match="did not reply"):
            await threads.run(lambda: ends.wait(60.0), call_s=0.05)
        with pytest.raises(Busy, match="its turn to read"):
            await threads.run(lambda: None)
        ends.set()
        patient = Threads(1, what="read")
        assert await patient.run(lambda: 7) == 7

    asyncio.run(asked())


def test_what_a_call_raises_is_raised() -> None:
    async def asked() -> None:
        with pytest.raises(ZeroDivisionError):
            await Threads(1, what="read").run(lambda: 1 // 0)

    asyncio.run(asked())
