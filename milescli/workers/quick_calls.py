"""Calls of a plain function in a process of its own, many at once, each of which may be over in a
moment: what is asked in one round of the event loop goes there in one frame. For functions that are
marked `in_threads` (see `worker_threads`)."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Protocol

from milescli.workers.async_isolated import AsyncIsolated
from milescli.workers.worker import UserProcess


class CallOwner(Protocol):
    """Whose calls they are."""

    loop: asyncio.AbstractEventLoop

    def settle_soon(self, settled: tuple[QuickCall, Any, BaseException | None]) -> None:
        """(the call, what it returned, what it raised), one of the latter two None."""


class QuickCall:
    """One that was sent. Its reply settles `future`, in the event loop."""

    __slots__ = ("_owner", "future")

    def __init__(self, owner: CallOwner) -> None:
        self._owner = owner
        self.future: asyncio.Future[Any] = owner.loop.create_future()

    def again(self) -> asyncio.Future[Any]:
        """Wait for the reply anew, where who waited was cancelled."""
        if self.future.cancelled():
            self.future = self._owner.loop.create_future()
        return self.future

    def set_running_or_notify_cancel(self) -> bool:
        """As futures of threads."""
        return True

    def set_result(self, value: Any) -> None:
        """By the thread that reads."""
        self._owner.settle_soon((self, value, None))

    def set_exception(self, error: BaseException) -> None:
        """By the thread that reads."""
        self._owner.settle_soon((self, None, error))


class CallProcess(Protocol):
    """A process that is asked so, here or on another computer; begun with the first call."""

    @property
    def lives(self) -> bool:
        """Whether it can be asked; one that was not begun can."""
        ...

    @property
    def pid(self) -> int | None:
        """Of the process on this computer; None where there is none here now."""
        ...

    async def begin(self, *args: Any) -> QuickCall:
        """Send a call, and do not wait for its reply. The future raises CallFailed where the
        function raises or the process ends, or what MilesError the function raised. Raises
        CallFailed where the process has ended."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class NewCallProcess(Protocol):
    """How one is had: the class QuickCalls, or a node's `NodeProcesses.process`."""

    def __call__(self, target: str, *, memory_bytes: int, memory_key: str) -> CallProcess:
        """`target`: `module:function` of ours, plain and marked `in_threads`; `memory_bytes`: what
        the process may take, as `memory_key` of the recipe says."""
        ...


class QuickCalls(AsyncIsolated):
    """One process, begun with the first call. Belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    """Known from the first call on."""

    def __init__(self, target: str, *, memory_bytes: int, memory_key: str) -> None:
        """As AsyncIsolated, of a plain function that is marked `in_threads`."""
        super().__init__(target, memory_bytes=memory_bytes, memory_key=memory_key)
        self._asked = list[tuple[QuickCall, Any]]()
        self._settled = deque[tuple[QuickCall, Any, BaseException | None]]()
        self._settles = False
        self._is_ready = False

    async def begin(self, *args: Any) -> QuickCall:
        """See CallProcess. CallFailed has the function's traceback."""
        if self._process is None or not self._is_ready:
            self.loop = asyncio.get_running_loop()
            await self._begun()
            self._is_ready = True
        call = QuickCall(self)
        if not self._asked:
            self.loop.call_soon(self._send)
        self._asked.append((call, args))
        return call

    def close(self) -> None:
        """See AsyncIsolated."""
        self._is_ready = False
        super().close()

    def settle_soon(self, settled: tuple[QuickCall, Any, BaseException | None]) -> None:
        """By any thread: all that come before the event loop gets round to it, at once."""
        self._settled.append(settled)
        if not self._settles:
            self._settles = True
            try:
                self.loop.call_soon_threadsafe(self._settle)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more

    def _settle(self) -> None:
        self._settles = False
        while self._settled:
            call, value, error = self._settled.popleft()
            self._num_running -= 1
            if call.future.done():
                continue
            if error is None:
                call.future.set_result(value)
            else:
                call.future.set_exception(error)

    def _send(self) -> None:
        asked, self._asked = self._asked, []
        process: UserProcess | None = self._process
        if process is None:  # closed meanwhile
            for call, _ in asked:
                call.future.cancel()
            return
        self._num_running += len(asked)
        process.call_many([(call, args) for call, args in asked])
        if self._watch is None or self._watch.done():
            self._watch = self.loop.create_task(self._watch_loop(process))
