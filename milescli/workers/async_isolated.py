"""Async functions of the user's that the driver awaits, in a process of their own: many calls run
in an event loop there, and may ask for things here. Whatever they do to that loop, the driver's own
goes on."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

from milescli.core import user_code
from milescli.core.errors import MilesError
from milescli.workers.worker import MEMORY_BYTES, CallFailed, UserProcess

PING_EVERY_S = 5.0
"""While calls run: does their event loop get round to it?"""

Answer = Callable[..., Awaitable[Any]]
"""What is asked for there -> what is had here."""


class AsyncIsolated:
    """One process, begun with the first call. Belongs to one event loop."""

    def __init__(
        self, target: str, *, memory_bytes: int = MEMORY_BYTES, memory_key: str = ""
    ) -> None:
        """`target`: `module:function` of ours, an `async def`, which calls the user's there;
        `memory_bytes`: what it may take, as `memory_key` of the recipe says."""
        self._said = (target, memory_bytes, memory_key)
        self._process: UserProcess | None = None
        self._num_running = 0
        self._watch: asyncio.Task[None] | None = None

    async def call(self, *args: Any, answer: Answer, **options: Any) -> Any:
        """What the target returns. `answer`: awaited with what it asks for (`user_worker.asking`).
        Raises what `answer` raised, a MilesError of the target's, or CallFailed with its
        traceback."""
        process, loop = await self._begun(), asyncio.get_running_loop()
        answering, failures = set[asyncio.Task[None]](), list[Exception]()

        async def settle(question: int, asked: tuple[Any, ...]) -> None:
            value: Any
            try:
                value = await answer(*asked)
            except MilesError as error:
                value = error
            except Exception as error:  # a fault of ours, or of an engine: told there, kept here
                failures.append(error)
                value = RuntimeError(f"miles failed: {error!r}")
            process.answer(number, question, value)

        def start(question: int, asked: tuple[Any, ...]) -> None:
            task = loop.create_task(settle(question, asked))
            answering.add(task)
            task.add_done_callback(answering.discard)

        number, reply = process.call(
            *args,
            on_ask=lambda question, asked: loop.call_soon_threadsafe(start, question, asked),
            **options,
        )
        self._num_running += 1
        if self._watch is None or self._watch.done():
            self._watch = loop.create_task(self._watch_loop(process))
        try:
            return await asyncio.wrap_future(reply)
        except CallFailed as error:
            raise failures[-1] if failures else error from None
        except asyncio.CancelledError:
            process.cancel(number)
            raise
        finally:
            self._num_running -= 1
            for task in list(answering):
                task.cancel()

    @property
    def pid(self) -> int | None:
        """Of the process; None where there is none now."""
        return self._process.pid if self._process is not None else None

    @property
    def lives(self) -> bool:
        """Whether it can be asked; one that was not begun can."""
        return self._process is None or self._process.lives

    def close(self) -> None:
        """End the process; a later call begins another."""
        if self._process is not None:
            self._process.end()
            self._process = None

    async def _begun(self) -> UserProcess:
        """One that has ended by itself fails what it is asked: what it held is lost."""
        process = self._process
        if process is None:
            process = self._process = UserProcess(*self._said, shows_output=True)
            weakref.finalize(self, process.end)
        await asyncio.shield(asyncio.wrap_future(process.ready))
        return process

    async def _watch_loop(self, process: UserProcess) -> None:
        """Ends the process where its event loop does not come round for `BOUND_S`."""
        while self._num_running and process.lives:
            pong = asyncio.wrap_future(process.ping())
            try:
                async with asyncio.timeout(user_code.BOUND_S):
                    await pong
            except TimeoutError:
                where = await asyncio.to_thread(process.where_it_is)
                process.end(
                    f"it held its event loop up for {user_code.BOUND_S:g} s"
                    + (f"; it was at{where}" if where else "")
                )
                return
            except CallFailed:
                return
            await asyncio.sleep(min(PING_EVERY_S, user_code.BOUND_S))
