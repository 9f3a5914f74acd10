"""Evaluations on engines of their own, which are given the weights of a step, and answer while the
run goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from milescli.core.types import WeightVersion
from milescli.runtime.devices import Devices


class EvaluationsBeside:
    """One at a time. Belongs to one event loop."""

    def __init__(self, devices: Devices, measure: Callable[[int], Awaitable[None]]) -> None:
        """`devices`: the trainer, and the engines for evaluations; `measure`: asks these, and says
        what came of it."""
        self._devices, self._measure = devices, measure
        self._running: asyncio.Future[None] | None = None

    async def begin(self, step: int, version: WeightVersion, *, verify: bool) -> None:
        """Wait for the one before, give the engines the trainer's weights, which are those of
        `step`, and go on. Raises what the one before raised, or the publish."""
        await self.finish()
        await self._devices.publish(version, verify=verify)
        self._running = asyncio.ensure_future(self._measure(step))

    async def finish(self) -> None:
        """Wait for the last. Raises what it raised."""
        if self._running is not None:
            await self._running
            self._running = None

    async def drop(self) -> None:
        """End it, whatever it had."""
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._running
            self._running = None

    async def probe(self) -> None:
        """Raises what the running one raised: the run hears of it at once."""
        running = self._running
        if running is not None and running.done() and not running.cancelled():
            running.result()
