"""Ranks of a service that die, hang or fail: each adapter is where its last request left it. Ranks
are stand-ins that hold lists; real ones die in tests/end_to_end."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.core.errors import CheckpointError, NotFiniteError, WaitTimeout, WorkerDied
from milescli.core.events import EventBus, Notice, WorkerLost, WorkerReplaced
from milescli.recipe.machine import Fault
from milescli.runtime.recovery.restarts import Repairs, Restarts
from milescli.runtime.service import trainer
from milescli.runtime.service.trainer import ServiceTrainer
from milescli.train.base import TrainBatch
from tests.runtime.recovery.dying_ranks import Ranks

METHODS = ("begin_adapter", "accumulate", "apply", "load_adapter", "keep_adapter", "take_turn")
Held = tuple[list[Any], list[int]]
"""(seed and steps, gradients since) of an adapter"""


@dataclass(eq=False)
class AdapterRanks(Ranks):
    """A step of theirs is the list of the batches whose gradients it has."""

    held: dict[str, Held] = field(default_factory=dict)
    turn: str = ""
    is_disk_full: bool = False
    fails_in: str = ""
    """A method that raises what nobody expected, half-way."""

    async def take_turn(self, adapter: str) -> None:
        self._called("take_turn")
        self.turn = adapter
        self.held.setdefault(adapter, ([], []))

    async def drop_adapter(self, adapter: str) -> None:
        self.held.pop(adapter, None)

    async def begin_adapter(self, seed: int) -> None:
        self._called("begin_adapter")
        assert self.held[self.turn] == ([], []), "it is new"
        self.held[self.turn][0].append(seed)

    async def accumulate(self, batch: TrainBatch, *, backward: bool) -> int:
        steps, gradients = self.held[self.turn]
        assert steps, "nobody began it"
        self._called("accumulate")
        if batch.shards[0].size_bytes == 0:
            raise NotFiniteError("not finite", why="planted", fix="none")
        if backward:
            gradients.append(batch.shards[0].size_bytes)
        return len(steps)

    async def apply(self, step: float) -> str:
        steps, gradients = self.held[self.turn]
        before, gradients[:] = gradients.copy(), []
        if self.fails_in == "apply":
            raise RuntimeError("planted")
        self._called("apply")
        steps.append([step, *before])
        return f"a step of {before}"

    async def load_adapter(self, folder: Path, *, with_optimizer: bool) -> None:
        steps, gradients = self.held[self.turn]
        gradients.clear()
        self._called("load_adapter")
        steps[:] = json.loads((folder / "saved").read_text())

    async def keep_adapter(self, folder: Path) -> None:
        if self.fails_in == "keep_adapter":
            raise RuntimeError("planted")
        (folder / "torn").write_text("half")
        self._called("keep_adapter")
        if self.is_disk_full:
            raise CheckpointError("not written", why="no space", fix="none")
        (folder / "kept").write_text(json.dumps(self.held[self.turn]))

    async def restore_adapter(self, folder: Path) -> None:
        self._called("restore_adapter")
        assert self.held[self.turn] == ([], []), "it is new"
        steps, gradients = json.loads((folder / "kept").read_text())
        self.held[self.turn] = (steps, gradients)


@dataclass
class Rig:
    """A service's trainer."""

    folder: Path
    first: AdapterRanks = field(default_factory=AdapterRanks)
    then: list[AdapterRanks] = field(default_factory=list)
    """Those that are started after it, in order; beyond them, healthy ones."""
    limits: Fault = field(default_factory=lambda: Fault(max_restarts=100))
    events: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = self.first
        self.trainer = ServiceTrainer(
            self.first,  # type: ignore[arg-type]
            restart=self.restart,  # type: ignore[arg-type]
            repairs=Repairs(
                bus=EventBus([self.events.append]),
                restarts=Restarts(limits=self.limits, unit="request"),
                step=lambda: self.trainer.progress,
            ),
            silence_s=30.0,
            folder=self.folder / "recovery",
        )

    async def restart(self) -> AdapterRanks:
        self.ranks = self.then.pop(0) if self.then else AdapterRanks()
        return self.ranks

    async def do(self, name: str, method: str, *args: object, **kwargs: object) -> Any:
        return await self.trainer.call(method, *args, adapter=name, **kwargs)

    async def learn(self, name: str, size_bytes: int) -> Any:
        return await self.do(name, "accumulate", batch_of(size_bytes), backward=True)

    async def held(self, name: str) -> Held:
        """Where the adapter is; a pass that changes nothing brings it to the ranks."""
        await self.do(name, "accumulate", batch_of(1), backward=False)
        steps, gradients = self.ranks.held[name]
        return list(steps), list(gradients)

    @property
    def kinds(self) -> list[type]:
        return [type(event) for event in self.events]

    @property
    def warnings(self) -> list[str]:
        notices = [event for event in self.events if isinstance(event, Notice)]
        return [event.text for event in notices if event.level == "warning"]


def batch_of(size_bytes: int) -> TrainBatch:
    """As far as a trainer that records batches looks at one."""
    return TrainBatch(shards=[SimpleNamespace(size_bytes=size_bytes)])  # type: ignore[list-item]


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


deaths = st.dictionaries(st.sampled_from(METHODS), st.integers(1, 4), max_size=2)
requests = st.tuples(
    st.sampled_from("ab"), st.sampled_from(["learn", "learn", "apply", "load", "look", "bad"])
)


@given(st.lists(requests, max_size=14), st.lists(deaths, min_size=1, max_size=2), st.booleans())
def test_whenever_ranks_die_each_adapter_is_where_its_requests_left_it(
    wanted: list[tuple[str, str]], dies: list[dict[str, int]], writes: bool
) -> None:
    """Both where requests are repeated alone, and where adapters are written after each."""

    async def live(rig: Rig) -> list[Any]:
        said: list[Any] = []
        for name in "ab":
            await rig.do(name, "begin_adapter", ord(name))
        (rig.folder / "saved").write_text("[7, [8]]")
        for number, (name, what) in enumerate(wanted):
            match what:
                case "learn":
                    said.append(await rig.learn(name, number + 1))
                case "apply":
                    said.append(await rig.do(name, "apply", 0.5))
                case "load":
                    await rig.do(name, "load_adapter", rig.folder, with_optimizer=True)
                case "bad":
                    with pytest.raises(NotFiniteError):
                        await rig.learn(name, 0)
                case _:
                    said.append(await rig.held(name))
        return [*said, await rig.held("a"), await rig.held("b")]

    limits = Fault(max_restarts=100, kept_gib=1e-12 if writes else 1.0)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        first, *then = [AdapterRanks(dies_in=dict(each)) for each in dies]
        hurt, unhurt = Rig(Path(folder), first, then, limits), Rig(Path(other), limits=limits)
        assert asyncio.run(live(hurt)) == asyncio.run(live(unhurt))
        kept = [*(hurt.folder / "recovery").glob("*")]
        assert len(kept) <= 2, "one of each adapter"
        asyncio.run(hurt.trainer.close())
        assert not (hurt.folder / "recovery").exists()


def test_adapters_are_restored_when_they_are_next_used(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def work() -> None:
        for name in "abc":
            await rig.do(name, "begin_adapter", 1)
            await rig.learn(name, 5)
        await rig.trainer.call("drop_adapter", "c")
        rig.first.is_dead = True
        await rig.do("a", "apply", 0.5)
        assert set(rig.ranks.held) == {"a"}
        assert await rig.held("b") == ([1], [5])
        with pytest.raises(CheckpointError, match="c is lost"):
            await rig.learn("c", 5)

    run(work)
    assert rig.kinds == [WorkerLost, WorkerReplaced, Notice, Notice]
    text = rig.events[1].sentence  # type: ignore[attr-defined]
    assert "restores each of 2 adapters" in text


def test_adapters_are_written_so_that_little_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "REPEATED_S", 0.0)
    monkeypatch.setattr(trainer, "WRITE_SHARE", float("inf"))
    rig = Rig(tmp_path)

    async def work() -> None:
        await rig.do("a", "begin_adapter", 1)
        for _ in range(3):
            await rig.learn("a", 5)
        rig.first.is_dead = True
        assert await rig.held("a") == ([1], [5, 5, 5])

    run(work)
    assert "as it was last written, 0 requests repeated" in rig.events[-1].text  # type: ignore[attr-defined]
    assert len([*(tmp_path / "recovery").iterdir()]) == 1


def test_a_full_disk_loses_only_adapters_whose_requests_need_too_much_memory(
    tmp_path: Path,
) -> None:
    full = AdapterRanks(is_disk_full=True)
    rig = Rig(tmp_path, first=full, limits=Fault(kept_gib=1000 / 1024**3))

    async def work() -> None:
        for name in "abc":
            await rig.do(name, "begin_adapter", 1)
        await rig.learn("a", 300)
        await rig.learn("b", 900)
        await rig.do("b", "apply", 0.5)
        assert len(rig.warnings) == 1 and "no space" in rig.warnings[0]
        full.is_dead = True
        for _ in range(2):
            with pytest.raises(CheckpointError, match="b is lost") as caught:
                await rig.learn("b", 5)
            assert "no space" in caught.value.why
        assert await rig.held("a") == ([1], [300])

    run(work)


def test_an_adapter_is_safe_again_once_it_could_be_written(tmp_path: Path) -> None:
    full = AdapterRanks(is_disk_full=True)
    rig = Rig(tmp_path, first=full, limits=Fault(kept_gib=1000 / 1024**3))

    async def work() -> None:
        await rig.do("a", "begin_adapter", 1)
        await rig.learn("a", 2000)
        full.is_disk_full = False
        await rig.learn("a", 2000)
        full.is_dead = True
        assert await rig.held("a") == ([1], [2000, 2000])

    run(work)


def test_a_load_is_not_repeated_when_it_may_be_of_another_state(tmp_path: Path) -> None:
    full = AdapterRanks(is_disk_full=True)
    rig = Rig(tmp_path, first=full)
    (tmp_path / "saved").write_text("[7]")

    async def work() -> None:
        await rig.do("a", "begin_adapter", 1)
        await rig.do("a", "load_adapter", tmp_path, with_optimizer=True)
        (tmp_path / "saved").write_text("[8]")
        full.is_dead = True
        with pytest.raises(CheckpointError, match="a is lost"):
            await rig.learn("a", 5)

    run(work)


def test_a_request_that_was_done_does_not_fail_where_the_adapter_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "REPEATED_S", 0.0)
    rig = Rig(tmp_path, first=AdapterRanks(fails_in="keep_adapter"))

    async def work() -> None:
        await rig.do("a", "begin_adapter", 1)
        await rig.learn("a", 5)
        assert await rig.held("a") == ([1], [5])

    run(work)
    assert "RuntimeError: planted" in rig.warnings[0]


def test_a_request_that_kills_ranks_fails_alone_and_changes_nothing(tmp_path: Path) -> None:
    deadly = [AdapterRanks(dies_in={"apply": 1}) for _ in range(3)]
    rig = Rig(tmp_path, first=deadly[0], then=deadly[1:])

    async def work() -> None:
        for name in "ab":
            await rig.do(name, "begin_adapter", 1)
            await rig.learn(name, 5)
        with pytest.raises(
            WorkerDied, match=r"not done, and changed nothing.*rank 1 died"
        ) as caught:
            await rig.do("a", "apply", 0.5)
        assert "died 3 times at request" in caught.value.why
        assert await rig.held("b") == ([1], [5])
        assert await rig.do("a", "apply", 0.5) == "a step of [5]"

    run(work)


def test_a_request_that_fails_half_way_changes_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def work() -> None:
        await rig.do("a", "begin_adapter", 1)
        await rig.learn("a", 5)
        rig.first.fails_in = "apply"
        with pytest.raises(RuntimeError, match="planted"):
            await rig.do("a", "apply", 0.5)
        rig.first.fails_in = ""
        assert await rig.do("a", "apply", 0.5) == "a step of [5]"

    run(work)


def test_ranks_that_live_and_do_not_finish_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("milescli.runtime.recovery.healing_trainer.DEATH_GRACE_S", 0.0)
    rig = Rig(tmp_path)

    async def hangs(*_: object) -> None:
        raise WaitTimeout("waited 120 s for trainer rank 0", why="it is in `apply`", fix="none")

    async def work() -> None:
        await rig.do("a", "begin_adapter", 1)
        rig.first.apply = hangs  # type: ignore[method-assign]
        assert await rig.do("a", "apply", 0.5) == "a step of []"

    run(work)
    assert "trainer hangs" in rig.events[0].what  # type: ignore[attr-defined]


def test_deaths_while_nobody_asks_are_no_reason_to_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def work() -> None:
        await rig.do("a", "begin_adapter", 1)
        for _ in range(5):
            dead = rig.ranks
            dead.is_dead = True
            while rig.ranks is dead:
                await rig.trainer.probe()
                await asyncio.sleep(0)
        assert await rig.held("a") == ([1], [])

    run(work)
    assert rig.kinds.count(WorkerReplaced) == 5
