"""Runs calls in threads, and awaits many at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_idle: list[SimpleQueue[Callable[[], None]]] = []
"""Idle threads that wait for a call: to start a thread takes as long as hundreds of short calls."""
os.register_at_fork(after_in_child=_idle.clear)  # a child has none of the threads


async def in_thread(call: Callable[[], T]) -> T:
    """Run `call` in a thread of its own, and wait for it. A call that hangs is abandoned: it never
    keeps the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():  # given up meanwhile
            return
        future.set_result(value) if error is None else future.set_exception(error)

    def run() -> None:
        value, failure = None, None
        try:
            value = call()
        except Exception as error:
            failure = error
        except BaseException as error:  # SystemExit and the like must not end the thread in silence
            failure = RuntimeError(f"raised {type(error).__name__}: {error}").with_traceback(
                error.__traceback__
            )
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, failure)

    try:
        calls = _idle.pop()
    except IndexError:
        calls = SimpleQueue()
        threading.Thread(target=_serve, args=(calls,), name="miles-call", daemon=True).start()
    calls.put(run)
    return await future


def _serve(calls: SimpleQueue[Callable[[], None]]) -> None:
    """Run the calls of a queue one after another, the body of a thread, until MAX_IDLE threads are
    idle."""
    while True:
        calls.get()()
        if len(_idle) >= MAX_IDLE:
            return
        _idle.append(calls)


MAX_IDLE = 32
"""Most threads that wait for a call."""


async def all_or_first_error(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run the calls at once, and return all results in order. Raises the first error, after the
    others were cancelled and have ended."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in running]
