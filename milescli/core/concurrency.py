"""Calls in threads, and many awaited at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Run `call` in a thread of its own and wait for it. One that hangs is left behind: it never
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

    threading.Thread(target=run, name="miles-call", daemon=True).start()
    return await future


async def all_or_first_error(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run the calls at once, and return all results in order. Raises the first error, after the
    others were cancelled and have ended."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in running]
