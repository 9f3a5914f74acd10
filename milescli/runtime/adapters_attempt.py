"""One attempt at a run of several adapters: one set of ranks and engines, and for each adapter a
loop of its own, strictly on-policy. While one is trained, the engines sample for the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.backends.sglang.client.http import EngineDied
from milescli.core.errors import NodesJoined, Stopped
from milescli.core.events import Event, EventBus, OfAdapter, RunEnded
from milescli.core.types import ROLLOUT, EngineAddress, WeightVersion
from milescli.runtime.attempt import Attempt
from milescli.runtime.devices import Devices
from milescli.runtime.recording.listeners import attach_run_files
from milescli.runtime.recovery.engine_keepers import EngineKeeper, Start
from milescli.runtime.recovery.healing_trainer import HealingTrainer
from milescli.runtime.recovery.rank_group import RankGroup
from milescli.runtime.reinforce_attempt import ReinforceAttempt
from milescli.runtime.session import RunSession
from milescli.runtime.spec import RunSpec
from milescli.train.base import Trainer


class SeveralAttempt(Attempt):
    """Trains several adapters at once: each is an `AdapterAttempt`, and all share this attempt's
    processes. It learns nothing itself: each adapter is an attempt of its own, which has the
    processes in common with the others."""

    def __init__(self, spec: RunSpec, *, session: RunSession, bus: EventBus) -> None:
        super().__init__(spec, session=session, bus=bus)
        self.changing, self.turn = asyncio.Lock(), asyncio.Lock()
        self.adapters = {
            name: AdapterAttempt(name, one, self) for name, one in spec.adapters.items()
        }
        self.probes += [one.saver.probe for one in self.adapters.values()]

    @property
    def step(self) -> int:
        """Steps that every adapter has done."""
        return min(one.step for one in self.adapters.values())

    @property
    def saved_step(self) -> int | None:
        """Return the step of the adapter that is furthest behind, of those that have steps to do.
        Of the adapter that is furthest behind, of those that have steps to do."""
        left = [one for one in self.adapters.values() if one.saved_step != one.spec.num_steps]
        saved = [one.saved_step for one in left or self.adapters.values()]
        return None if None in saved else min(step for step in saved if step is not None)

    @property
    def has_begun(self) -> bool:
        return any(one.run is not None for one in self.adapters.values())

    async def main(self) -> None:
        try:
            await super().main()
        finally:
            for one in self.adapters.values():
                await one.saver.close()
                await one.close_journal()

    async def work(self, trainer: Trainer, fleet: SglangFleet | None) -> None:
        assert fleet is not None, "nothing is sampled without engines"
        assert isinstance(trainer, HealingTrainer), "ranks whose adapters take turns"
        fleets = self.engines.adapters
        self.engines.keepers.append(
            EngineKeeper(
                AllFleets(fleets.values()),
                indices=self.session.builder.indices_of(ROLLOUT),
                engines=self.engines,
                builder=self.session.builder,
                repairs=self.repairs,
                join=self._take_in,
            )
        )
        await together(one.live(trainer, fleets[name]) for name, one in self.adapters.items())

    async def settle(self) -> None:
        for one in self.adapters.values():
            await one.settle()

    async def begin_with(self, trainer: Any) -> None:
        """Do nothing: each adapter begins in its own loop."""

    async def save_and_stop(self, stopped: Stopped) -> None:
        """Do nothing: each adapter saves what it has learned."""
        for one in self.adapters.values():
            try:
                await one.save_and_stop(stopped)
            except NodesJoined:
                pass
            except Stopped as told:
                stopped = told
        if isinstance(stopped, NodesJoined):
            raise stopped
        steps = ", ".join(f"{name} {one.step}" for name, one in self.adapters.items())
        command = f"miles resume {self.spec.run.shown}"
        raise Stopped(f"stopped after steps {steps}, and saved", why=stopped.why, fix=command)

    def tell_end(self, event: RunEnded) -> None:
        for one in self.adapters.values():
            one.bus.emit(
                RunEnded(
                    outcome=event.outcome, step=one.step, seconds=event.seconds, error=event.error
                )
            )
        super().tell_end(event)

    async def _restart_ranks(self) -> RankGroup:
        ranks = await self._start_bare_ranks()
        for name, one in self.adapters.items():
            await ranks.take_turn(name)
            await one.load_newest(ranks)
        return ranks

    async def _start_bare_ranks(self) -> RankGroup:
        for one in self.adapters.values():
            await one.saver.completed()
        return await super()._start_bare_ranks()

    async def _take_in(self, start: Start) -> None:
        """Give a new engine every adapter, and let it answer for it. Raises what any raises."""
        starting = asyncio.ensure_future(start())
        takes = [one.take_in(lambda: asyncio.shield(starting)) for one in self.adapters.values()]
        try:
            results = await asyncio.gather(*takes, return_exceptions=True)
        finally:
            starting.cancel()  # where nobody waits for it any more
        for error in results:
            if isinstance(error, BaseException):
                raise error


class AdapterAttempt(ReinforceAttempt):
    """Trains one of several adapters: has a loop, events and checkpoints of its own."""

    def __init__(self, name: str, spec: RunSpec, whole: SeveralAttempt) -> None:
        """`whole`: whose processes it has in common with the others."""
        bus = EventBus()
        attach_run_files(bus, spec.run)
        bus.listeners.append(_passed_on(name, whole.bus))
        super().__init__(spec, session=whole.session, bus=bus)
        self.name, self._whole = name, whole
        self.engines, self.repairs, self.stop = whole.engines, whole.repairs, whole.stop
        self.profiler = whole.profiler

    async def live(self, ranks: HealingTrainer, fleet: SglangFleet) -> None:
        """Begin where it begins, and learn to the last step."""
        trainer = ranks.of_adapter(self.name)
        self.saver.on_complete, self.saver.on_give_up = trainer.is_saved, trainer.is_given_up
        await self.begin_with(trainer)
        await self.work(trainer, fleet)
        await self.profiler.finish(self.step, loop=self)
        await self.saver.settle()
        self.saver.require_saved(self.step)

    def devices(self, trainer: Trainer, fleet: SglangFleet) -> Devices:
        """Return devices whose engines nobody else changes meanwhile. Nobody else changes the
        engines meanwhile."""
        return AdapterDevices(
            taking_turns=False,
            trainer=trainer,
            engines=fleet,
            changing=self._whole.changing,
            turn=self._whole.turn,
        )

    def keep_own(self, fleet: SglangFleet, devices: Devices) -> None:
        """Do nothing: one keeper keeps the engines alive for all adapters."""

    async def take_in(self, start: Callable[[], Awaitable[EngineAddress]]) -> None:
        """Let a new engine answer for this adapter, once it holds what the others do."""
        if self.run is not None:
            await self.run.devices.replace(start)
        else:
            fleet = self.engines.adapters[self.name]
            await fleet.admit(await start(), fleet.version)


@dataclass(slots=True, kw_only=True)
class AdapterDevices(Devices):
    """The turns of one of several adapters on the devices. Its turn with the trainer is from a step
    to the publish of what was learned in it: otherwise the next samples would wait for the steps of
    others."""

    turn: asyncio.Lock
    """Held by the adapter whose turn it is."""
    _is_ours: bool = False

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """As in Devices; `publish` follows, or this raises."""
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
    """Implements WatchedFleet: the engines of all adapters' fleets, which are the same."""

    def __init__(self, fleets: Iterable[SglangFleet]) -> None:
        self._fleets = list(fleets)

    @property
    def on_death(self) -> Callable[[EngineDied], None] | None:
        return self._fleets[0].on_death

    @on_death.setter
    def on_death(self, told: Callable[[EngineDied], None] | None) -> None:
        for fleet in self._fleets:
            fleet.on_death = told

    @property
    def engines(self) -> list[EngineAddress]:
        """That any of them asks."""
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


def _passed_on(name: str, bus: EventBus) -> Callable[[Event], None]:
    return lambda event: bus.emit(OfAdapter(adapter=name, event=event))


async def together(loops: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all to their ends. One that is stopped lets the others come to their own stops; any other
    error ends all. Raises it, or Stopped."""
    tasks = [asyncio.ensure_future(one) for one in loops]
    stopped: Stopped | None = None
    try:
        for done in asyncio.as_completed(tasks):
            try:
                await done
            except Stopped as told:
                stopped = told
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if stopped is not None:
        raise stopped
