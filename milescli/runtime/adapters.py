"""Trains several adapters in one attempt: one set of ranks and engines, and for each adapter a
strictly on-policy training of its own. While one is trained, the engines sample for the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.backends.sglang.client.http import EngineDied
from milescli.core.errors import Stopped
from milescli.core.events import AdapterEvent, EventBus
from milescli.core.types import ROLLOUT, EngineAddress, WeightVersion
from milescli.runtime.devices import Devices
from milescli.runtime.recording.listeners import attach_run_files
from milescli.runtime.recovery.engine_keepers import Start
from milescli.runtime.recovery.healing_trainer import HealingTrainer
from milescli.runtime.training import Training

if TYPE_CHECKING:
    from milescli.runtime.attempt import Attempt


def adapter_trainings(attempt: Attempt) -> list[Training]:
    """Return a training for each of the run's adapters, whose events are written to files of its
    own and passed on to the attempt's bus."""
    trainings = []
    for name, spec in attempt.spec.adapters.items():
        bus = EventBus()
        attach_run_files(bus, spec.run)
        bus.listeners.append(
            lambda event, name=name: attempt.bus.emit(AdapterEvent(adapter=name, event=event))
        )
        trainings.append(Training(attempt, spec, bus=bus, adapter=name))
    return trainings


async def train_together(attempt: Attempt, ranks: HealingTrainer) -> None:
    """Train all adapters to their last steps."""
    fleets = attempt.engines.adapters
    everyone = AllFleets(fleets.values())
    attempt.keep_engines(everyone, ROLLOUT, join=lambda start: _admit_engine(attempt, start))

    async def live(one: Training) -> None:
        assert one.adapter is not None, "one of several adapters"
        trainer = ranks.of_adapter(one.adapter)
        await one.begin(trainer)
        await one.live(trainer, fleets[one.adapter])
        await one.saver.settle()
        one.saver.require_saved(one.step)

    await run_together(map(live, attempt.trainings))


async def _admit_engine(attempt: Attempt, start: Start) -> None:
    """Start a new engine, and let it answer for each adapter once it holds the same weights as the
    other engines. Raises the first error of any adapter."""
    starting = asyncio.ensure_future(start())

    async def take_in(one: Training) -> None:
        if one.run is not None and one.run.devices is not None:
            await one.run.devices.replace(lambda: asyncio.shield(starting))
        else:
            fleet = attempt.engines.adapters[one.adapter or ""]
            await fleet.admit(await asyncio.shield(starting), fleet.version)

    try:
        results = await asyncio.gather(*map(take_in, attempt.trainings), return_exceptions=True)
    finally:
        starting.cancel()  # where nobody waits for it any more
    for error in results:
        if isinstance(error, BaseException):
            raise error


@dataclass(slots=True, kw_only=True)
class AdapterDevices(Devices):
    """Gives one of several adapters its turn on the devices. Its turn with the trainer lasts from a
    step to the publish of that step: otherwise the next samples would wait for the steps of
    others."""

    turn: asyncio.Lock
    """Held by the adapter whose turn it is."""
    _is_ours: bool = False

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Provide the devices for training, as in Devices; `publish` follows, or this raises."""
        await self.turn.acquire()
        self._is_ours = True
        try:
            async with Devices.training(self):
                yield
        except BaseException:
            self._end_turn()
            raise

    async def publish(self, version: WeightVersion, *, verify: bool = False) -> None:
        try:
            await Devices.publish(self, version, verify=verify)
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        if self._is_ours:
            self._is_ours = False
            self.turn.release()


class AllFleets:
    """Implements WatchedFleet for the fleets of all adapters, which have the same engines."""

    def __init__(self, fleets: Iterable[SglangFleet]) -> None:
        self._fleets = list(fleets)

    @property
    def on_death(self) -> Callable[[EngineDied], None] | None:
        return self._fleets[0].on_death

    @on_death.setter
    def on_death(self, listener: Callable[[EngineDied], None] | None) -> None:
        for fleet in self._fleets:
            fleet.on_death = listener

    @property
    def engines(self) -> list[EngineAddress]:
        """Return the engines of all fleets."""
        return list({engine.url: engine for f in self._fleets for engine in f.engines}.values())

    def remove(self, error: EngineDied) -> None:
        for fleet in self._fleets:
            fleet.remove(error)

    def num_waiting(self, url: str) -> int:
        return sum(fleet.num_waiting(url) for fleet in self._fleets)

    def silent_s(self, url: str) -> float:
        return min(fleet.silent_s(url) for fleet in self._fleets)

    async def answers(self, url: str) -> bool:
        return await self._fleets[0].answers(url)


async def run_together(loops: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all loops to their ends. If one is stopped, the others continue to their own safe points;
    any other error cancels all. Raises that error, or Stopped."""
    tasks = [asyncio.ensure_future(one) for one in loops]
    stopped: Stopped | None = None
    try:
        for done in asyncio.as_completed(tasks):
            try:
                await done
            except Stopped as error:
                stopped = error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if stopped is not None:
        raise stopped
