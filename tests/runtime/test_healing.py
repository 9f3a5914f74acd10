"""Engines that are kept alive: which death is answered by a new engine, and which ends the run.
Engines, their builder and the fleet are stand-ins; real ones die in tests/end_to_end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from milescli.backends.sglang.http import EngineDied
from milescli.core.errors import MismatchError, WorkerDied
from milescli.core.events import EventBus, WorkerLost, WorkerReplaced
from milescli.core.types import EngineAddress
from milescli.recipe.fault import Fault
from milescli.runtime.engines import Engines
from milescli.runtime.healing import EngineKeeper
from milescli.runtime.restarts import SAME_STEP_LIMIT, Restarts


@dataclass(eq=False)
class Actors:
    """One engine."""

    index: int
    generation: int = 0
    is_dead: bool = False

    @property
    def name(self) -> str:
        return f"engine {self.index}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{100 * self.generation + self.index}"

    async def check(self) -> None:
        if self.is_dead:
            raise WorkerDied(f"{self.name} died", why="planted", fix="none")


@dataclass
class Fleet:
    """Two engines that are asked."""

    urls: list[str]
    on_death: object = None

    @property
    def engines(self) -> list[str]:
        return self.urls

    def remove(self, error: EngineDied) -> None:
        self.urls = [url for url in self.urls if url != error.url]


@dataclass
class Rig:
    """A keeper of two engines, and what came of it."""

    limits: Fault = field(default_factory=Fault)
    fails: int = 0
    """Starts that fail before one succeeds."""
    holds_others: bool = False
    """New engines hold other weights than they were sent."""
    step: int = 4
    events: list[object] = field(default_factory=list)
    emptied: int = 0

    def __post_init__(self) -> None:
        self.may_start = asyncio.Event()
        self.engines = Engines(actors={0: Actors(0), 1: Actors(1)})  # type: ignore[dict-item]
        self.fleet = Fleet([engine.url for engine in self.engines.actors.values()])
        self.keeper = EngineKeeper(
            self.fleet,  # type: ignore[arg-type]
            indices=range(2),
            engines=self.engines,
            builder=self,  # type: ignore[arg-type]
            bus=EventBus([self.events.append]),
            restarts=Restarts(limits=self.limits),
            step=lambda: self.step,
            join=self.join,
        )
        self.keeper.on_empty = self._emptied

    def _emptied(self) -> None:
        self.emptied += 1

    async def restart_engine(self, dead: Actors, engines: Engines) -> EngineAddress:
        new = Actors(dead.index, dead.generation + 1)
        engines.actors[dead.index] = new  # type: ignore[assignment]
        await self.may_start.wait()
        if self.fails:
            self.fails -= 1
            raise WorkerDied(f"{new.name} ended while it started", why="planted", fix="none")
        return EngineAddress(url=new.url)

    async def join(self, start) -> None:
        engine = await start()
        if self.holds_others:
            raise MismatchError("an engine does not hold the weights", why="planted", fix="none")
        self.fleet.urls.append(engine.url)

    def kill(self, index: int) -> None:
        self.engines.actors[index].is_dead = True  # type: ignore[union-attr]

    async def settle(self) -> None:
        """Let engines start, until nothing is being replaced."""
        self.may_start.set()
        for _ in range(20):
            await asyncio.sleep(0)
        self.may_start.clear()
        await self.keeper.probe()

    @property
    def told(self) -> list[tuple[str, str]]:
        """(kind of event, engine)."""
        kinds = {WorkerLost: "lost", WorkerReplaced: "replaced"}
        return [(kinds[type(event)], event.worker) for event in self.events]  # type: ignore[attr-defined,index]


def test_a_dead_engine_is_asked_no_more_until_another_has_joined() -> None:
    rig = Rig()

    async def work() -> None:
        rig.kill(1)
        await rig.keeper.probe()
        assert rig.fleet.urls == ["http://127.0.0.1:0"]
        await rig.settle()

    asyncio.run(work())
    assert rig.fleet.urls == ["http://127.0.0.1:0", "http://127.0.0.1:101"]
    assert rig.told == [("lost", "engine 1"), ("replaced", "engine 1")]
    assert rig.emptied == 0


def test_what_the_fleet_hears_and_what_the_probe_sees_is_one_death() -> None:
    rig = Rig()
    error = EngineDied("engine 0 is dead", why="planted", fix="none")
    error.url = rig.engines.actors[0].url

    async def work() -> None:
        rig.kill(0)
        rig.keeper._hear(error)
        await rig.keeper.probe()
        await rig.settle()
        rig.keeper._hear(error)
        await rig.settle()

    asyncio.run(work())
    assert rig.told == [("lost", "engine 0"), ("replaced", "engine 0")]


def test_an_engine_that_does_not_start_is_started_once_more() -> None:
    rig = Rig(fails=1)

    async def work() -> None:
        rig.kill(0)
        rig.kill(1)
        await rig.keeper.probe()
        assert (rig.fleet.urls, rig.emptied) == ([], 1)
        await rig.settle()

    asyncio.run(work())
    assert len(rig.fleet.urls) == 2
    assert sorted(rig.told)[:3] == [
        ("lost", "engine 0"),
        ("lost", "engine 0"),
        ("lost", "engine 1"),
    ]


def test_the_death_beyond_the_bound_ends_the_run_with_its_cause() -> None:
    rig = Rig(limits=Fault(max_restarts=1))

    async def work() -> None:
        rig.kill(0)
        await rig.keeper.probe()
        await rig.settle()
        rig.step += 1
        rig.kill(1)
        with pytest.raises(WorkerDied, match="engine 1 died") as caught:
            await rig.keeper.probe()
        assert "fault.max_restarts" in caught.value.why

    asyncio.run(work())


def test_deaths_long_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("milescli.runtime.restarts.time.monotonic", lambda: clock[0])
    restarts = Restarts(limits=Fault(max_restarts=1, window_s=10.0))
    refusals = []
    for step, at in enumerate((0.0, 5.0, 11.0)):
        clock[0] = at
        refusals.append(restarts.refusal("engine 0", step) is None)
    assert refusals == [True, False, True]


def test_an_engine_that_dies_again_and_again_at_one_step_is_not_started_for_ever() -> None:
    restarts = Restarts(limits=Fault())
    refusals = [restarts.refusal("engine 0", 7) for _ in range(SAME_STEP_LIMIT)]
    assert refusals[:-1] == [None] * (SAME_STEP_LIMIT - 1)
    assert refusals[-1] == f"it died {SAME_STEP_LIMIT} times at step 8"
    assert restarts.refusal("engine 1", 7) is None


def test_a_new_engine_that_holds_other_weights_ends_the_run() -> None:
    rig = Rig(holds_others=True)

    async def work() -> None:
        rig.kill(0)
        await rig.keeper.probe()
        with pytest.raises(MismatchError):
            await rig.settle()

    asyncio.run(work())


def test_at_the_end_nothing_is_started_any_more() -> None:
    rig = Rig()

    async def work() -> None:
        rig.kill(0)
        await rig.keeper.probe()
        await rig.keeper.close()

    asyncio.run(work())
    assert rig.told == [("lost", "engine 0")]
    assert rig.fleet.on_death is None
