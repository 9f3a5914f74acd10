"""Engines that are kept alive: which death is answered by a new engine, and which ends the run.
Engines, their builder and the fleet are stand-ins; real ones die in tests/end_to_end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from milescli.backends.sglang.client.http import EngineDied
from milescli.backends.sglang.launch.process import ProcessLook
from milescli.core.errors import MismatchError, WorkerDied
from milescli.core.events import EventBus, WorkerLost, WorkerReplaced, WorkerSilent
from milescli.core.types import EngineAddress
from milescli.recipe.machine import Fault, MachineSettings
from milescli.runtime.recovery import engine_keepers
from milescli.runtime.recovery.engine_keepers import EngineKeeper
from milescli.runtime.recovery.engines import Engines
from milescli.runtime.recovery.restarts import SAME_STEP_LIMIT, Repairs, Restarts
from tests.waiting import until_async

pytestmark = pytest.mark.usefixtures("a_second_a_look")


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

    hangs: str | None = None
    cpu_s: float = 0.0
    specs: tuple[object, ...] = (SimpleNamespace(log_path=None, device_kind="cpu"),)

    async def look(self) -> ProcessLook:
        if self.is_dead:
            raise WorkerDied(f"{self.name} died", why="planted", fix="none")
        return ProcessLook(stopped=self.hangs, cpu_s=self.cpu_s)

    async def dump_stacks(self) -> list[str]:
        return ["engine.stacks.txt"]


@dataclass
class Fleet:
    """Two engines that are asked."""

    urls: list[str]
    on_death: object = None

    @property
    def engines(self) -> list[str]:
        return self.urls

    waiting: int = 0
    is_well: bool = True
    said_s: float = 1e9
    """Seconds since an engine said anything."""

    def num_waiting(self, url: str) -> int:
        return self.waiting

    def silent_s(self, url: str) -> float:
        return self.said_s

    async def answers(self, url: str) -> bool:
        return self.is_well

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
    ended: list[str] = field(default_factory=list)
    emptied: int = 0

    def __post_init__(self) -> None:
        self.recipe = SimpleNamespace(machine=MachineSettings(silence_s=30.0))
        self.may_start = asyncio.Event()
        self.engines = Engines(actors={0: Actors(0), 1: Actors(1)})  # type: ignore[dict-item]
        self.fleet = Fleet([engine.url for engine in self.engines.actors.values()])
        self.keeper = EngineKeeper(
            self.fleet,  # type: ignore[arg-type]
            indices=range(2),
            engines=self.engines,
            builder=self,  # type: ignore[arg-type]
            repairs=Repairs(
                bus=EventBus([self.events.append]),
                restarts=Restarts(limits=self.limits),
                step=lambda: self.step,
            ),
            join=self.join,
        )
        self.keeper.on_empty = self._emptied

    def _emptied(self) -> None:
        self.emptied += 1

    async def end_engine(self, dead: Actors) -> None:
        self.ended.append(dead.name)

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
        rig.keeper._on_death(error)
        await rig.keeper.probe()
        await rig.settle()
        rig.keeper._on_death(error)
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
    monkeypatch.setattr("milescli.runtime.recovery.restarts.time.monotonic", lambda: clock[0])
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


def watched(rig: Rig, *, until: type) -> None:
    """Look at the engines until an event of this kind."""

    async def work() -> None:
        async def is_there() -> bool:
            await rig.keeper.probe()
            return any(isinstance(event, until) for event in rig.events)

        await until_async(is_there)
        await rig.settle()

    asyncio.run(work())


def test_an_engine_that_hangs_is_shown_then_ended_and_replaced() -> None:
    rig = Rig()
    rig.engines.actors[1].hangs = "its scheduler is stopped"  # type: ignore[union-attr]
    watched(rig, until=WorkerLost)
    silent, lost, replaced = rig.events
    assert isinstance(silent, WorkerSilent) and isinstance(replaced, WorkerReplaced)
    assert silent.worker == "engine 1"
    assert silent.why == "its scheduler is stopped, and 0 requests are waiting for it"
    assert "engine 1 has been silent" in lost.what  # type: ignore[attr-defined]
    assert "engine.stacks.txt" in lost.why  # type: ignore[attr-defined]
    assert rig.ended == ["engine 1"]


def test_an_engine_that_speaks_again_is_left_alone_and_may_be_silent_for_so_long_again() -> None:
    rig = Rig()
    rig.engines.actors[1].hangs = "its scheduler is stopped"  # type: ignore[union-attr]
    watched(rig, until=WorkerSilent)
    rig.engines.actors[1].hangs = None  # type: ignore[union-attr]
    asyncio.run(rig.keeper.probe())
    assert len(rig.events) == 1
    silence = rig.keeper._watches[1].silence
    assert silence.seconds == 0.0 and silence.limit_s > silence.bound_s


@dataclass
class Unanswering:
    """Two engines that replied before, and say nothing more while 31 requests wait for them."""

    work_s: float = 0.0
    """What they were asked may take."""
    computes: bool = False
    for_s: float = 0.0
    """Looked at for so long, or until there is news."""

    def events(self, monkeypatch: pytest.MonkeyPatch) -> list[object]:
        monkeypatch.setattr(engine_keepers, "HEALTH_CHECK_AFTER_S", 0.01)
        monkeypatch.setattr(engine_keepers.EngineWatch, "_work_s", lambda _: self.work_s)
        rig = Rig()
        rig.fleet.said_s = 0.0
        rig.fleet.waiting = 31

        async def work() -> None:
            for _ in range(3):
                await rig.keeper.probe()
                await asyncio.sleep(0.02)
            rig.fleet.said_s, rig.fleet.is_well = 1e9, False
            until = time.monotonic() + (self.for_s or 60)
            while not rig.events and time.monotonic() < until:
                for engine in rig.engines.actors.values():
                    engine.cpu_s += 10.0 * self.computes  # type: ignore[union-attr]
                await rig.keeper.probe()
                await asyncio.sleep(0.01)
            await rig.keeper.close()

        asyncio.run(work())
        return rig.events


@pytest.mark.parametrize("how", [{}, {"work_s": 1e9}, {"computes": True, "work_s": 0.5}])
def test_an_engine_that_does_not_answer_while_requests_wait_for_it_hangs(
    monkeypatch: pytest.MonkeyPatch, how: dict
) -> None:
    """Whatever it was asked, where it does not compute; else after the time that this takes."""
    assert "31 requests are waiting for it" in Unanswering(**how).events(monkeypatch)[0].why  # type: ignore[attr-defined]


def test_an_engine_that_computes_is_slow_and_not_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Unanswering(computes=True, work_s=1e9, for_s=1.0).events(monkeypatch)
