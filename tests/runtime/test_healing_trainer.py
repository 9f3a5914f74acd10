"""Ranks that die and are replaced: what new ones do again, and what they do not. Ranks are
stand-ins that keep a number; real ones die in tests/end_to_end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from milescli.core.errors import CheckpointError, WaitTimeout, WorkerDied
from milescli.core.events import EventBus, Notice, WorkerLost, WorkerReplaced, WorkerSilent
from milescli.recipe.fault import Fault
from milescli.runtime.healing_trainer import HealingTrainer
from milescli.runtime.restarts import Restarts
from milescli.runtime.trainer import Hang
from milescli.train.base import TrainBatch


@dataclass(eq=False)
class Ranks:
    """Their weights are the batches that they were given, one after the other."""

    weights: list[int] = field(default_factory=list)
    dies_in: dict[str, int] = field(default_factory=dict)
    """Method -> in which call of it."""
    pending: tuple[Path, list[int]] | None = None
    """A folder, and what is being written there."""
    fleets: set[str] = field(default_factory=set)
    is_dead: bool = False
    hangs: str | None = None
    """Why the second rank seems to hang."""
    published: list[list[int]] = field(default_factory=list)

    def _called(self, method: str) -> None:
        left = self.dies_in.get(method)
        if left is not None:
            self.dies_in[method] = left - 1
            self.is_dead |= left == 1
        if self.is_dead:
            raise WaitTimeout("a rank lost the others", why="planted", fix="none")

    async def find_dead(self, *, within_s: float = 0.0) -> WorkerDied | None:
        died = WorkerDied("trainer rank 1 died", why="planted", fix="none")
        return died if self.is_dead else None

    async def look(self) -> list[Hang | None]:
        if (died := await self.find_dead()) is not None:
            raise died
        return [None, Hang(self.hangs, is_sure=True) if self.hangs else None]

    @property
    def ranks(self) -> list[object]:
        return [SimpleNamespace(name=f"trainer rank {n}", log_path=None) for n in (0, 1)]

    def dump_stacks(self) -> str:
        return "trainer.stacks.txt"

    async def kill(self) -> None:
        self.is_dead = True

    async def step(self, batch: int, **rates: float) -> str:
        self._called("step")
        self.weights.append(batch)
        return f"report of {batch}"

    async def save(self, folder: Path) -> None:
        (folder / "torn").write_text("half")
        self._called("save")
        self.pending = folder, list(self.weights)

    async def finish_save(self) -> None:
        self._called("finish_save")
        if self.pending is not None:
            folder, weights = self.pending
            (folder / "torn").unlink()
            (folder / "weights").write_text(" ".join(map(str, weights)))
            self.pending = None

    async def connect_engines(self, engines: list[str], fleet: str) -> None:
        self.fleets.add(fleet)

    async def publish(self, version: int, fleet: str) -> None:
        self._called("publish")
        assert fleet in self.fleets, "no channel is open"
        self.published.append(list(self.weights))

    async def load(self, folder: Path, *, weights_only: bool = False) -> None:
        self.weights = read(folder)

    async def dismiss_teachers(self) -> None:
        self.weights.append(-1)


def read(folder: Path) -> list[int]:
    return [int(word) for word in (folder / "weights").read_text().split()]


@dataclass
class Rig:
    """A trainer, and its checkpoints."""

    folder: Path
    first: Ranks = field(default_factory=Ranks)
    then: list[Ranks] = field(default_factory=list)
    """Those that are started in its place, in order; beyond them, healthy ones."""
    limits: Fault = field(default_factory=Fault)
    newest: Path | None = None
    events: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = self.first
        self.trainer = HealingTrainer(
            self.first,  # type: ignore[arg-type]
            restart=self.restart,  # type: ignore[arg-type]
            bus=EventBus([self.events.append]),
            restarts=Restarts(limits=self.limits),
            step=lambda: len(self.ranks.weights),
            silence_s=0.2,
        )

    async def restart(self) -> Ranks:
        self.ranks = self.then.pop(0) if self.then else Ranks()
        if self.newest is not None:
            await self.ranks.load(self.newest)
        return self.ranks

    async def begin_save(self, step: int) -> Path:
        folder = self.folder / f"step_{step}"
        folder.mkdir()
        await self.trainer.save(folder)
        return folder

    async def end_save(self, folder: Path) -> None:
        await self.trainer.finish_save()
        self.newest = folder
        self.trainer.is_saved()

    async def step(self, *batches: int) -> list[str]:
        return [await self.trainer.step(batch, lr=0.1) for batch in batches]  # type: ignore[arg-type,misc]

    @property
    def kinds(self) -> list[type]:
        return [type(event) for event in self.events]


def run(rig: Rig, work: Callable[[], object]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


def test_new_ranks_do_again_what_was_done_since_the_checkpoint(tmp_path: Path) -> None:
    rig = Rig(tmp_path, first=Ranks(dies_in={"step": 5}))

    async def work() -> None:
        await rig.step(1, 2)
        await rig.end_save(await rig.begin_save(2))
        assert await rig.step(3, 4, 5, 6) == [f"report of {n}" for n in (3, 4, 5, 6)]

    run(rig, work)
    assert rig.ranks.weights == [1, 2, 3, 4, 5, 6]
    assert rig.kinds == [WorkerLost, WorkerReplaced]
    assert rig.events[0].what == "trainer rank 1 died"  # type: ignore[attr-defined]


@pytest.mark.parametrize("dies_in", [{"save": 2}, {"finish_save": 2}, {"step": 4}])
def test_a_checkpoint_that_was_being_written_is_that_of_its_step(tmp_path: Path, dies_in) -> None:
    """Its files are complete after the next step, as they are written beside it."""
    rig = Rig(tmp_path, first=Ranks(dies_in=dies_in))

    async def work() -> None:
        await rig.step(1)
        await rig.end_save(await rig.begin_save(1))
        await rig.step(2, 3)
        pending = await rig.begin_save(3)
        await rig.step(4)
        await rig.end_save(pending)
        await rig.step(5)

    run(rig, work)
    assert read(tmp_path / "step_3") == [1, 2, 3]
    assert [file.name for file in (tmp_path / "step_3").iterdir()] == ["weights"]
    assert rig.ranks.weights == [1, 2, 3, 4, 5]
    assert rig.kinds == [WorkerLost, WorkerReplaced]


def test_new_ranks_open_the_channels_that_the_dead_ones_had(tmp_path: Path) -> None:
    rig = Rig(tmp_path, first=Ranks(dies_in={"publish": 2}))

    async def work() -> None:
        await rig.end_save(await rig.begin_save(0))
        await rig.trainer.connect_engines(["engine"], "rollout")  # type: ignore[list-item]
        for version in (1, 2):
            await rig.step(version)
            await rig.trainer.publish(version, "rollout")  # type: ignore[arg-type]

    run(rig, work)
    assert rig.first.published == [[1]] and rig.ranks.published == [[1, 2]]


def test_ranks_that_die_while_nobody_asks_them_are_replaced_by_a_look(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def work() -> None:
        await rig.end_save(await rig.begin_save(0))
        await rig.trainer.dismiss_teachers()
        await rig.step(1)
        await rig.trainer.probe()
        rig.first.is_dead = True
        for _ in range(3):
            await rig.trainer.probe()
            await asyncio.sleep(0)
        await rig.step(2)

    run(rig, work)
    assert rig.ranks is not rig.first and rig.ranks.weights == [-1, 1, 2]
    assert rig.kinds == [WorkerLost, WorkerReplaced]


def test_a_checkpoint_that_new_ranks_cannot_write_is_not_taken_for_one(tmp_path: Path) -> None:
    full = Ranks()
    rig = Rig(tmp_path, first=Ranks(dies_in={"step": 3}), then=[full])

    async def cannot(folder: Path) -> None:
        raise CheckpointError("not written", why="planted: no space", fix="none")

    full.save = cannot  # type: ignore[method-assign]

    async def work() -> None:
        await rig.end_save(await rig.begin_save(0))
        await rig.step(1)
        await rig.begin_save(1)
        await rig.step(2, 3)
        with pytest.raises(CheckpointError, match="not written"):
            await rig.trainer.finish_save()
        rig.trainer.is_given_up()
        full.dies_in = {"step": 1}
        await rig.step(4)
        await rig.trainer.finish_save()

    run(rig, work)
    assert rig.ranks is not full and rig.ranks.weights == [1, 2, 3, 4]


def test_ranks_that_die_while_they_catch_up_are_replaced_once_more(tmp_path: Path) -> None:
    rig = Rig(tmp_path, first=Ranks(dies_in={"step": 3}), then=[Ranks(dies_in={"step": 2})])

    async def work() -> None:
        await rig.end_save(await rig.begin_save(0))
        await rig.step(1, 2, 3)

    run(rig, work)
    assert rig.ranks.weights == [1, 2, 3]
    assert rig.kinds == [WorkerLost, WorkerLost, WorkerReplaced]


def test_before_the_first_checkpoint_all_is_done_again_from_the_beginning(tmp_path: Path) -> None:
    rig = Rig(tmp_path, first=Ranks(dies_in={"step": 3}))
    run(rig, lambda: rig.step(1, 2, 3, 4))
    assert rig.ranks.weights == [1, 2, 3, 4]
    assert rig.ranks is not rig.first
    assert rig.kinds == [WorkerLost, WorkerReplaced]


def test_beyond_the_bound_it_is_an_error(tmp_path: Path) -> None:
    rig = Rig(tmp_path, first=Ranks(dies_in={"step": 1}), limits=Fault(max_restarts=0))

    async def work() -> None:
        await rig.end_save(await rig.begin_save(0))
        with pytest.raises(WorkerDied, match="rank 1 died") as caught:
            await rig.step(1)
        assert "fault.max_restarts" in caught.value.why

    run(rig, work)


def test_a_rank_that_hangs_is_shown_then_replaced_and_its_step_is_done(tmp_path: Path) -> None:
    rig = Rig(tmp_path, first=Ranks(hangs="it is stopped"))
    hung = asyncio.Event()

    async def waits(batch: int, **rates: float) -> str:
        await hung.wait()
        raise WaitTimeout("a rank lost the others", why="planted", fix="none")

    async def kill() -> None:
        rig.first.is_dead = True
        hung.set()

    rig.first.step, rig.first.kill = waits, kill  # type: ignore[method-assign]

    async def work() -> None:
        stepping = asyncio.ensure_future(rig.trainer.step(1, lr=0.1))  # type: ignore[arg-type]
        while not stepping.done():
            await rig.trainer.probe()
            await asyncio.sleep(0.01)

    run(rig, work)
    assert rig.kinds == [WorkerSilent, WorkerLost, WorkerReplaced]
    assert rig.events[0].worker == "trainer rank 1"  # type: ignore[attr-defined]
    assert "trainer rank 1 has not spoken" in rig.events[1].what  # type: ignore[attr-defined]
    assert rig.ranks.weights == [1]


def test_a_step_that_takes_much_longer_than_any_before_counts_as_hung(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    hung = asyncio.Event()

    async def work() -> None:
        await rig.step(1)
        rig.first.step = lambda *_, **__: hung.wait()  # type: ignore[method-assign,assignment]
        stepping = asyncio.ensure_future(rig.trainer.step(2, lr=0.1))  # type: ignore[arg-type]
        while not any(isinstance(event, WorkerLost) for event in rig.events):
            await rig.trainer.probe()
            if rig.first.is_dead:
                rig.first.step = Ranks.step.__get__(rig.first)  # type: ignore[method-assign]
                stepping.cancel()
                break
            await asyncio.sleep(0.01)
        await asyncio.gather(stepping, return_exceptions=True)

    run(rig, work)
    assert "`step`" in rig.events[0].why  # type: ignore[attr-defined]
    assert rig.first.is_dead


def batch_of(size_bytes: int) -> TrainBatch:
    """As far as a trainer that keeps batches looks at one."""
    return TrainBatch(shards=[SimpleNamespace(size_bytes=size_bytes)])  # type: ignore[list-item]


def test_where_too_much_would_be_kept_the_next_checkpoint_is_waited_for(tmp_path: Path) -> None:
    rig = Rig(tmp_path, limits=Fault(kept_gib=1.0))
    large = batch_of(3 * 2**28)

    async def work() -> None:
        await rig.end_save(await rig.begin_save(0))
        await rig.step(large, large)  # type: ignore[arg-type]
        rig.first.is_dead = True
        with pytest.raises(WorkerDied, match="rank 1 died"):
            await rig.trainer.probe()
        rig.first.is_dead = False
        rig.first.weights = [1, 2]
        pending = await rig.begin_save(2)
        await rig.step(3)
        await rig.end_save(pending)
        rig.first.dies_in = {"step": 1}
        await rig.step(4)

    run(rig, work)
    assert rig.kinds == [Notice, WorkerLost, WorkerReplaced]
    assert "fault.kept_gib" in rig.events[0].text  # type: ignore[attr-defined]
    assert rig.ranks.weights == [1, 2, 3, 4]


def test_what_is_no_death_of_a_rank_is_raised_as_it_is(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def fails(*_: object) -> None:
        raise WorkerDied("engine 0 is dead", why="planted", fix="none")

    rig.first.publish = fails  # type: ignore[method-assign]

    async def work() -> None:
        await rig.end_save(await rig.begin_save(0))
        await rig.trainer.connect_engines([], "rollout")
        with pytest.raises(WorkerDied, match="engine 0"):
            await rig.trainer.publish(1, "rollout")  # type: ignore[arg-type]

    run(rig, work)
    assert rig.events == []
