"""Calls that read disks, each in a thread of its own, so many at once. One that hangs on a dead
disk is left behind and goes on counting: it holds nothing else up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from milescli.core.concurrency import in_thread
from milescli.web.refusals import Busy

T = TypeVar("T")

NUM_READERS = 4
"""Requests that read at once."""
NUM_SEARCHES = 2
"""Requests that search through text at once, beside those."""
CALL_S = 60.0
"""Longest that one may take."""
WAIT_S = 30.0
"""Longest that one waits for its turn."""


class Threads:
    """So many at once, of one event loop."""

    def __init__(self, count: int, *, what: str, wait_s: float = WAIT_S) -> None:
        """`what`: that they do, for errors."""
        self._turns = asyncio.Semaphore(count)
        self._count, self._what, self._wait_s = count, what, wait_s

    async def run(self, call: Callable[[], T], *, call_s: float = CALL_S) -> T:
        """Raises Busy where none is free in time, or the call takes too long; and what it
        raises."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._turns.acquire()
        except TimeoutError:
            raise Busy(
                f"the server of the page waited {self._wait_s:g} s for its turn to {self._what}",
                why=f"{self._count} others do so, and none has ended",
                fix="ask again",
            ) from None
        task = asyncio.ensure_future(in_thread(call))
        task.add_done_callback(self._done)
        done, _ = await asyncio.wait({task}, timeout=call_s)
        if not done:
            raise Busy(
                f"the disk did not reply within {call_s:g} s",
                why=f"the server of the page waits for it to {self._what}",
                fix="look whether the runs folder can be read: ls",
            )
        return task.result()

    def _done(self, task: asyncio.Future[object]) -> None:
        self._turns.release()
        if not task.cancelled():
            task.exception()  # whoever asked may be gone
