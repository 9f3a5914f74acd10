"""Processes for quick calls on a node of the run other than the driver's: the object in the actor
that `node_processes` spawns there. Independent of what is called."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from milescli.core.errors import MilesError
from milescli.core.imports import Origin
from milescli.workers.async_worker import QuickCalls
from milescli.workers.worker import CallFailed

PROCESS_HOST = "milescli.backends.ray.process_host:ProcessHost"
POLL_S = 10.0
"""Longest that a request for replies waits for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOrder:
    """Orders a further process, which starts with its first call. Other fields are as in
    QuickCalls."""

    process: int
    target: str
    memory_bytes: int
    memory_key: str


@dataclass(frozen=True, slots=True)
class CallOrder:
    """Orders one call of a process."""

    process: int
    call: int
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CloseOrder:
    """Orders that a process is ended; its calls get no reply."""

    process: int


Order = OpenOrder | CallOrder | CloseOrder


@dataclass(frozen=True, slots=True)
class CallResult:
    """Holds the result of a call."""

    call: int
    value: Any
    error: Exception | None
    """MilesError or CallFailed; None if it returned `value`."""
    process_lives: bool


class ProcessHost:
    """Hosts processes. All methods but the first two run in the actor's event loop; none waits for
    a call."""

    def __init__(self, *, origin: Origin) -> None:
        """Import the user's code from where the driver does."""
        origin.adopt()
        self._processes: dict[int, QuickCalls] = {}
        self._settled: list[CallResult] = []
        self._has_settled = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()

    def num_cores(self) -> int:
        """Return the number of cores that this process may use."""
        return len(os.sched_getaffinity(0))

    async def take(self, orders: Sequence[Order]) -> None:
        """Execute the orders in their order."""
        for order in orders:
            if isinstance(order, OpenOrder):
                self._processes[order.process] = QuickCalls(
                    order.target, memory_bytes=order.memory_bytes, memory_key=order.memory_key
                )
            elif isinstance(order, CloseOrder):
                self._processes.pop(order.process).close()
            else:
                task = asyncio.ensure_future(self._run(order))
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    async def replies(self) -> list[CallResult]:
        """Return the results since the last call; empty if there is none within `POLL_S`."""
        if not self._settled:
            self._has_settled.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._has_settled.wait()
        settled, self._settled = self._settled, []
        return settled

    async def _run(self, order: CallOrder) -> None:
        process = self._processes.get(order.process)
        if process is None:
            return  # closed meanwhile: to ask it would begin another
        value, error = None, None
        try:
            call = await process.begin(*order.args)
            value = await call.future
        except (MilesError, CallFailed) as raised:
            error = raised
        except OSError as raised:  # this node begins no process now
            error = CallFailed(f"{type(raised).__name__}: {raised}")
        self._settled.append(CallResult(order.call, value, error, process.lives))
        self._has_settled.set()
