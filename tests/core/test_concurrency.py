"""Calls in threads: none runs beside another in its thread, and none keeps what follows waiting."""

from __future__ import annotations

import asyncio
import threading

import pytest

from milescli.core.concurrency import in_thread


def test_a_call_that_hangs_does_not_keep_the_next_ones_waiting() -> None:
    async def run() -> None:
        hangs = threading.Event()
        given_up = asyncio.ensure_future(in_thread(hangs.wait))
        results = await asyncio.gather(*(in_thread(lambda n=n: n) for n in range(200)))
        assert results == list(range(200)) and not given_up.done()
        hangs.set()
        assert await given_up

    asyncio.run(run())


def test_calls_at_once_have_a_thread_each() -> None:
    async def run() -> None:
        meeting = threading.Barrier(50)
        met = asyncio.gather(*(in_thread(lambda: meeting.wait(timeout=60)) for _ in range(50)))
        assert sorted(await met) == list(range(50))

    asyncio.run(run())


def test_a_thread_goes_on_after_a_call_that_failed() -> None:
    async def run() -> None:
        def fail() -> None:
            raise ValueError("no")

        for _ in range(3):
            with pytest.raises(ValueError, match="no"):
                await in_thread(fail)
            assert await in_thread(lambda: 1) == 1

    asyncio.run(run())
