"""Calls the processes that collect: each by itself, or all that live. Owned by `collectors`;
`followers` uses them too."""

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
    """Holds the request for a group that a process samples, or has sampled and holds."""

    position: int
    epoch: int
    prompt: Prompt
    step: int
    future: asyncio.Future[Group | None]

    @property
    def group(self) -> Group | None:
        """Return the group if it is complete, else None."""
        future = self.future
        is_made = future.done() and not future.cancelled() and future.exception() is None
        return future.result() if is_made else None


@dataclass(slots=True, eq=False)
class Worker:
    """Holds the driver's state of one process."""

    number: int
    handle: ActorHandle | None = None
    """None while a replacement starts."""
    requests: dict[int, GroupRequest] = field(default_factory=dict)
    """Ticket -> group, until it is released."""
    orders: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    """Tickets that are released and not yet reported to the process."""
    unreported: set[int] = field(default_factory=set)
    """Tickets of its predecessor whose groups it has not reported yet."""
    engines: dict[str, tuple[int, float]] = field(default_factory=dict)
    """URL -> (number of open requests, time.monotonic of the last reply)."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if a process runs that has received all orders of its predecessor."""

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call the process. Raises WorkerDied if there is none, and as `ActorHandle.run`."""
        if self.handle is None:
            raise WorkerDied(f"collector {self.number} has ended", why="it is replaced", fix=[])
        return await self.handle.run(method, *args, timeout_s=timeout_s)


class Workers:
    """Holds all collecting processes. Belongs to one event loop."""

    def __init__(self, count: int, *, timeout_s: float) -> None:
        """Create `count` workers without processes. `timeout_s` bounds each call."""
        self._all = [Worker(number) for number in range(count)]
        self.timeout_s = timeout_s
        self._later = set[asyncio.Task[Any]]()

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def of(self, ticket: int) -> Worker:
        """Return the worker that samples the group of this ticket."""
        return self._all[ticket % len(self._all)]

    async def call(self, worker: Worker, method: str, *args: Any) -> Any:
        """Call one process. Raises as `Worker.call`."""
        return await worker.call(method, *args, timeout_s=self.timeout_s)

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call all processes that live, and return their results. One that starts later begins with
        the current state."""
        living = [worker for worker in self if worker.handle is not None]
        results = await asyncio.gather(
            *(self.call(worker, method, *args) for worker in living), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, WorkerDied):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    def send(self, worker: Worker, method: str, *args: Any) -> None:
        """Call one process without waiting for it. If it dies, its replacement begins with the
        state of that time."""

        async def call() -> None:
            with suppress(WorkerDied):
                await self.call(worker, method, *args)

        self.start_background(call())

    def start_background(self, call: Awaitable[Any]) -> None:
        """Start a call whose result nobody waits for."""
        task = asyncio.ensure_future(call)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def cancel_background(self) -> None:
        """Cancel the calls that `start_background` started."""
        for task in (later := list(self._later)):
            task.cancel()
        await asyncio.gather(*later, return_exceptions=True)
