"""Many calls at once in a process: quick ones are not held up by slow ones, nothing is lost where
one hangs, raises or dies."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from milescli.core.errors import RecipeError
from milescli.workers.async_worker import QuickCalls
from milescli.workers.worker import CallFailed

pytestmark = pytest.mark.timeout(400)


def work(what: Any, value: Any) -> Any:
    """In the process: what a test asks."""
    if what == "sleep":
        time.sleep(value)
    elif what == "nap":
        time.sleep(value / 1000)
    elif what == "hang":
        threading.Event().wait()
    elif what == "raise":
        raise value
    elif what == "exit":
        os._exit(3)
    elif what == "lambda":
        return lambda: value
    return threading.get_ident() if what == "thread" else value


work.in_threads = True  # type: ignore[attr-defined]


def _with(play: Callable[[QuickCalls], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        calls = QuickCalls(f"{__name__}:work", memory_bytes=2 << 30, memory_key="")
        try:
            async with asyncio.timeout(60):
                return await play(calls)
        finally:
            calls.close()

    return asyncio.run(run())


async def _of(calls: QuickCalls, *args: Any) -> Any:
    call = await calls.begin(*args)
    return await call.future


def test_every_call_has_its_own_reply() -> None:
    async def play(calls: QuickCalls) -> list[int]:
        return await asyncio.gather(*(_of(calls, "say", number) for number in range(500)))

    assert _with(play) == list(range(500))


def test_quick_calls_share_a_thread_and_slow_ones_hold_nobody_up() -> None:
    async def play(calls: QuickCalls) -> tuple[list[int], list[Any]]:
        quick = await asyncio.gather(*(_of(calls, "thread", 0) for _ in range(20)))
        slow = [asyncio.ensure_future(_of(calls, "hang", 0)) for _ in range(100)]
        heard = await asyncio.gather(*(_of(calls, "say", number) for number in range(200)))
        assert not any(call.done() for call in slow)
        for call in slow:
            call.cancel()
        return quick, heard

    quick, heard = _with(play)
    assert len(set(quick)) <= 2 and heard == list(range(200))


def test_one_that_ends_late_does_not_end_the_lead_of_another() -> None:
    async def play(calls: QuickCalls) -> list[Any]:
        made = list[Any]()
        for _ in range(3):  # a slow kind (of float), and a quick one (of int) meanwhile
            asked = [_of(calls, "sleep", 0.05), *(_of(calls, "nap", 3) for _ in range(40))]
            made += await asyncio.gather(*asked)
            await asyncio.sleep(1.1)
        return made

    assert _with(play) == [0.05, *[3] * 40] * 3


def test_a_slow_kind_is_quick_again_after_a_while() -> None:
    async def play(calls: QuickCalls) -> set[int]:
        await _of(calls, "sleep", 0.2)
        await asyncio.sleep(1.2)
        return {await _of(calls, "thread", 0) for _ in range(20)}

    assert len(_with(play)) <= 2


def test_what_a_call_raises_is_its_own() -> None:
    async def play(calls: QuickCalls) -> list[Any]:
        error = RecipeError("no", why="never", fix="else")
        asked = [("raise", ValueError("bad")), ("raise", error), ("lambda", 1), ("say", 2)]
        return await asyncio.gather(*(_of(calls, *each) for each in asked), return_exceptions=True)

    plain, ours, unsent, said = _with(play)
    assert isinstance(plain, CallFailed) and "ValueError: bad" in str(plain)
    assert isinstance(ours, RecipeError) and ours.what == "no"
    assert isinstance(unsent, CallFailed) and "no other process can be given" in str(unsent)
    assert said == 2


def test_a_process_that_ends_fails_what_it_had_and_what_comes_after() -> None:
    async def play(calls: QuickCalls) -> None:
        hanging = asyncio.ensure_future(_of(calls, "hang", 0))
        with pytest.raises(CallFailed, match="exit code 3"):
            await _of(calls, "exit", 0)
        with pytest.raises(CallFailed):
            await hanging
        assert not calls.lives
        with pytest.raises(CallFailed):
            await _of(calls, "say", 1)
        calls.close()
        assert await _of(calls, "say", 2) == 2, "another was begun"

    _with(play)


def test_a_reply_that_nobody_waited_for_can_be_waited_for_again() -> None:
    async def play(calls: QuickCalls) -> int:
        call = await calls.begin("sleep", 0.5)
        waiting = asyncio.ensure_future(_await(call.future))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return await call.wait_again()

    assert _with(play) == 0.5


async def _await(future: asyncio.Future[Any]) -> Any:
    return await future
