"""Calls functions of the user in a process, from an event loop. `AsyncWorker` is for an async
function, whose calls may send requests to this process. `QuickCalls` is for a plain function whose
calls may take microseconds; all calls of one round of the event loop are sent in one frame."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from milescli.core import user_code
from milescli.core.errors import MilesError
from milescli.workers.worker import MEMORY_BYTES, CallFailed, UserWorker

PING_EVERY_S = 5.0
"""Seconds between two pings of the process's event loop while calls run."""

Answer = Callable[..., Awaitable[Any]]
"""Returns the answer to a request of a running call."""


class AsyncWorker:
    """Calls an async function in one process, started with the first call. Belongs to one event
    loop. The user's code may block the event loop of the process, but not the driver's."""

    def __init__(
        self, target: str, *, memory_bytes: int = MEMORY_BYTES, memory_key: str = ""
    ) -> None:
        """Set the target. `target`, `memory_bytes`, `memory_key`: as in UserWorker; the target is
        an `async def`."""
        self._arguments = (target, memory_bytes, memory_key)
        self._worker: UserWorker | None = None
        self._num_running = 0
        self._watch: asyncio.Task[None] | None = None

    async def call(self, *args: Any, answer: Answer, **options: Any) -> Any:
        """Return the target's result. `answer` is awaited with each request that the target sends
        (`child.parent_requests`). Raises what `answer` raised, a MilesError of the target, or
        CallFailed with its traceback."""
        worker, loop = await self._ready_worker(), asyncio.get_running_loop()
        answering, failures = set[asyncio.Task[None]](), list[Exception]()

        async def settle(question: int, request: tuple[Any, ...]) -> None:
            value: Any
            try:
                value = await answer(*request)
            except MilesError as error:
                value = error
            except Exception as error:  # a fault of ours, or of an engine: raised here, too
                failures.append(error)
                value = RuntimeError(f"miles failed: {error!r}")
            worker.answer(number, question, value)

        def start(question: int, request: tuple[Any, ...]) -> None:
            task = loop.create_task(settle(question, request))
            answering.add(task)
            task.add_done_callback(answering.discard)

        number, reply = worker.call(
            *args,
            on_request=lambda question, request: loop.call_soon_threadsafe(
                start, question, request
            ),
            **options,
        )
        self._count(worker, 1)
        try:
            return await asyncio.wrap_future(reply)
        except CallFailed as error:
            raise failures[-1] if failures else error from None
        except asyncio.CancelledError:
            worker.cancel(number)
            raise
        finally:
            self._num_running -= 1
            for task in list(answering):
                task.cancel()

    @property
    def pid(self) -> int | None:
        """Return the id of the process; None if there is none now."""
        return self._worker.pid if self._worker is not None else None

    @property
    def lives(self) -> bool:
        """Return True if the process can be called, also before it has started."""
        return self._worker is None or self._worker.lives

    def close(self) -> None:
        """End the process; a later call starts another."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    async def _ready_worker(self) -> UserWorker:
        """Return the process once it is ready. If it has ended by itself, raise CallFailed, because
        its state is lost."""
        worker = self._worker
        if worker is None:
            worker = self._worker = UserWorker(*self._arguments, shows_output=True)
            weakref.finalize(self, worker.end)
        await asyncio.shield(asyncio.wrap_future(worker.ready))
        return worker

    def _count(self, worker: UserWorker, num_calls: int) -> None:
        """Watch the process while calls run."""
        self._num_running += num_calls
        if self._watch is None or self._watch.done():
            self._watch = asyncio.get_running_loop().create_task(self._watch_loop(worker))

    async def _watch_loop(self, worker: UserWorker) -> None:
        """End the process if its event loop does not answer for `BOUND_S`."""
        while self._num_running and worker.lives:
            pong = asyncio.wrap_future(worker.ping())
            try:
                async with asyncio.timeout(user_code.BOUND_S):
                    await pong
            except TimeoutError:
                where = await asyncio.to_thread(worker.current_lines)
                worker.end(
                    f"it held its event loop up for {user_code.BOUND_S:g} s"
                    + (f"; it was at{where}" if where else "")
                )
                return
            except CallFailed:
                return
            await asyncio.sleep(min(PING_EVERY_S, user_code.BOUND_S))


_Settlement = tuple["QuickCall", Any, BaseException | None]
"""A call, its result, and what it raised."""


class QuickCall:
    """Represents a call that was sent. Its reply settles `future`, in the event loop. Implements
    Reply."""

    __slots__ = ("_settle_soon", "future")

    def __init__(self, settle_soon: Callable[[_Settlement], None] | None = None) -> None:
        """Create a call. `settle_soon`: takes the reply from the reading thread and calls `settle`
        later; None: `settle` is called directly."""
        self._settle_soon = settle_soon
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def wait_again(self) -> asyncio.Future[Any]:
        """Wait for the reply again, if the previous waiter was cancelled."""
        if self.future.cancelled():
            self.future = asyncio.get_running_loop().create_future()
        return self.future

    def settle(self, value: Any, error: BaseException | None) -> None:
        """Set the result or the exception. Called in the event loop."""
        if self.future.done():
            return
        if error is None:
            self.future.set_result(value)
        else:
            self.future.set_exception(error)

    def set_running_or_notify_cancel(self) -> bool:
        """Do what Reply requires before a result is set."""
        return True

    def set_result(self, value: Any) -> None:
        """Set the result, as Reply requires."""
        assert self._settle_soon is not None
        self._settle_soon((self, value, None))

    def set_exception(self, error: BaseException) -> None:
        """Set the exception, as Reply requires."""
        assert self._settle_soon is not None
        self._settle_soon((self, None, error))


class CallProcess(Protocol):
    """Defines a process with quick calls, here or on another computer; started with the first
    call."""

    @property
    def lives(self) -> bool:
        """Return True if the process can be called, also before it has started."""
        ...

    @property
    def pid(self) -> int | None:
        """Return the id of the process; None if it is on another computer, or there is none now."""
        ...

    async def begin(self, *args: Any) -> QuickCall:
        """Send a call without waiting for its reply. The future raises CallFailed if the function
        raises or the process ends, or the function's own MilesError. Raises CallFailed if the
        process has ended."""
        ...

    def close(self) -> None:
        """End the process."""
        ...


NewCallProcess = Callable[..., CallProcess]
"""Makes a process, with the arguments of QuickCalls: that class, or a node's
`NodeProcesses.process`."""


class QuickCalls(AsyncWorker):
    """Calls a plain function that is marked `in_threads` (see `child_threads`) in one process,
    started with the first call. Belongs to one event loop. Implements CallProcess."""

    def __init__(self, target: str, *, memory_bytes: int, memory_key: str) -> None:
        """Take the arguments of AsyncWorker."""
        super().__init__(target, memory_bytes=memory_bytes, memory_key=memory_key)
        self._unsent = list[tuple[QuickCall, Any]]()
        self._replies = deque[_Settlement]()
        self._settles = self._is_ready = False
        self._loop: asyncio.AbstractEventLoop | None = None
        """Set by the first call."""

    async def begin(self, *args: Any) -> QuickCall:
        """Send a call, as CallProcess requires. CallFailed has the function's traceback."""
        if self._worker is None or not self._is_ready:
            self._loop = asyncio.get_running_loop()
            await self._ready_worker()
            self._is_ready = True
        assert self._loop is not None
        call = QuickCall(self._settle_soon)
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent.append((call, (args, {})))
        return call

    def close(self) -> None:
        """Close the process, as AsyncWorker requires."""
        self._is_ready = False
        super().close()

    def _send(self) -> None:
        calls, self._unsent = self._unsent, []
        if (worker := self._worker) is None:  # closed meanwhile
            for call, _ in calls:
                call.future.cancel()
            return
        worker.request_many(calls)
        self._count(worker, len(calls))

    def _settle_soon(self, reply: _Settlement) -> None:
        """Queue a reply, from any thread; the event loop settles all queued replies at once."""
        self._replies.append(reply)
        if not self._settles:
            self._settles = True
            try:
                assert self._loop is not None
                self._loop.call_soon_threadsafe(self._settle)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more

    def _settle(self) -> None:
        self._settles = False
        while self._replies:
            call, value, error = self._replies.popleft()
            self._num_running -= 1
            call.settle(value, error)
