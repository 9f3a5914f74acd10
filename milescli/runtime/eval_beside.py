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

    def __init__(
        self,
        devices: Devices,
        measure: Callable[[int], Awaitable[None]],
        *,
        tell: Callable[[str], None],
    ) -> None:
        """`devices`: the trainer, and the engines for evaluations; `measure`: asks these, and says
        what came of it; `tell`: warns the user."""
        self._devices, self._measure, self._tell = devices, measure, tell
        self._running: asyncio.Future[None] | None = None
        self._step = 0

    async def begin(self, step: int, version: WeightVersion, *, verify: bool) -> None:
        """Wait for the one before, give the engines the trainer's weights, which are those of
        `step`, and go on. Raises what the one before raised, or the publish."""
        await self.finish()
        await self._devices.publish(version, verify=verify)
        self._running, self._step = asyncio.ensure_future(self._measure(step)), step

    async def finish(self) -> None:
        """Wait for the last. Raises what it raised."""
        while (running := self._running) is not None:
            await asyncio.wait({running})
            if running is self._running:  # else it was given up meanwhile
                running.result()
                self._running = None

    def give_up(self) -> None:
        """End the one that runs, as all its engines died: the trainer has moved on, and new engines
        cannot be given the weights of its step."""
        if self._running is not None:
            self._running.cancel()
            self._running = None
            self._tell(f"the evaluation of step {self._step} was given up: its engines died")

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
