"""The processes that collect, as the driver calls them: each by itself, or all that live. Owned by
`collectors`; `followers` uses them too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from milescli.backends.ray.actor import ActorHandle
from milescli.core.errors import WorkerDied
from milescli.core.types import Group, Prompt


@dataclass(slots=True)
class GroupRequest:
    """A group that a process makes, or has made and holds."""

    position: int
    epoch: int
    prompt: Prompt
    step: int
    future: asyncio.Future[Group | None]

    @property
    def group(self) -> Group | None:
        """Return the group where it is made."""
        future = self.future
        is_made = future.done() and not future.cancelled() and future.exception() is None
        return future.result() if is_made else None


@dataclass(slots=True, eq=False)
class Worker:
    """One process."""

    number: int
    handle: ActorHandle | None = None
    """None while a replacement starts."""
    requests: dict[int, GroupRequest] = field(default_factory=dict)
    """Ticket -> group, until it is released."""
    orders: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    """Tickets that are released, until the process is told."""
    unreported: set[int] = field(default_factory=set)
    """Tickets of its predecessor that it has not reported yet."""
    engines: dict[str, tuple[int, float]] = field(default_factory=dict)
    """URL -> (number of open requests, time.monotonic of the last reply)."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if there is a process that has got all orders of the one before."""

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call the process. Raises WorkerDied where there is none, and as `ActorHandle.run`."""
        if self.handle is None:
            raise WorkerDied(f"collector {self.number} has ended", why="it is replaced", fix=[])
        return await self.handle.run(method, *args, timeout_s=timeout_s)


class Workers:
    """All collecting processes. Belongs to one event loop."""

    def __init__(self, count: int, *, timeout_s: float) -> None:
        """`timeout_s` bounds each call."""
        self._all = [Worker(number) for number in range(count)]
        self.timeout_s = timeout_s
        self._later = set[asyncio.Task[Any]]()

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def of(self, ticket: int) -> Worker:
        """Return who makes the group of this ticket."""
        return self._all[ticket % len(self._all)]

    async def call(self, worker: Worker, method: str, *args: Any) -> Any:
        """Call one process. Raises as `Worker.call`."""
        return await worker.call(method, *args, timeout_s=self.timeout_s)

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Return the results of those that live: one that is started anew knows."""
        living = [worker for worker in self if worker.handle is not None]
        results = await asyncio.gather(
            *(self.call(worker, method, *args) for worker in living), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, WorkerDied):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    def send(self, worker: Worker, method: str, *args: Any) -> None:
        """Call one process, and do not wait for it: its successor begins with what there is
        then."""

        async def call() -> None:
            with suppress(WorkerDied):
                await self.call(worker, method, *args)

        self.start_background(call())

    def start_background(self, call: Awaitable[Any]) -> None:
        """Begin what nobody waits for."""
        task = asyncio.ensure_future(call)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def cancel_background(self) -> None:
        """Give up what was begun so."""
        for task in (later := list(self._later)):
            task.cancel()
        await asyncio.gather(*later, return_exceptions=True)
