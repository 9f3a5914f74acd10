"""The wanted end of an attempt: the user asked for it, or it is to begin again; heard where nothing
is half done."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from milescli.core.errors import NodesJoined, Stopped

T = TypeVar("T")


class StopFlag:
    """Set where the user asked for the end; the loop looks at it where nothing is half done."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._joined: NodesJoined | None = None

    def set(self) -> None:
        """Ask for the end."""
        self._event.set()

    def set_joined(self, joined: NodesJoined) -> None:
        """Ask for another beginning, between two steps."""
        self._joined = joined

    def check(self) -> None:
        """Raises Stopped where it is set, NodesJoined where there is to be another beginning."""
        if self._event.is_set():
            raise Stopped("stopped on request", why="Ctrl-C or SIGTERM", fix="miles resume")
        if self._joined is not None:
            raise self._joined

    async def unless_set(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which changes nothing that must be saved; cancelled, with Stopped,
        where the flag is set meanwhile."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.check()
            return task.result()
        finally:
            stop.cancel()
            task.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)
