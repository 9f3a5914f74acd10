"""Ranks that die and are replaced: what new ones do again, and what they do not. Ranks are
stand-ins that keep a number; real ones die in tests/end_to_end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from milescli.core.errors import CheckpointError, WorkerDied
from milescli.core.events import Notice, WorkerLost, WorkerReplaced
from milescli.recipe.machine import Fault
from milescli.train.base import TrainBatch
from tests.runtime.recovery.dying_ranks import Ranks, Rig, read, run

pytestmark = pytest.mark.usefixtures("a_second_a_look")


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
        await rig.trainer.free_teachers()
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
        rig.trainer.note_save_failed()
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


def test_ranks_that_take_turns_are_replaced_when_it_is_theirs_as_they_were(
    tmp_path: Path,
) -> None:
    order = list[str]()

    @asynccontextmanager
    async def room() -> AsyncIterator[None]:
        order.append("engines make room")
        yield
        order.append("engines are as they were")

    second = Ranks()
    rig = Rig(tmp_path, room=room, then=[second])

    async def work() -> None:
        await rig.step(1)
        await rig.trainer.offload_optimizer_state()
        await rig.trainer.sleep()
        rig.first.is_dead = True
        for _ in range(3):
            await rig.trainer.probe()
            await asyncio.sleep(0)
        assert rig.ranks is rig.first, "engines have the devices"
        assert not await rig.trainer.is_written()
        second.postures = order
        await rig.trainer.wake()
        await rig.step(2)

    run(rig, work)
    assert order == ["engines make room", "sleep", "engines are as they were", "wake"]
    assert rig.ranks.weights == [1, 2]


def test_beyond_the_bound_it_is_an_error(tmp_path: Path) -> None:
    rig = Rig(tmp_path, first=Ranks(dies_in={"step": 1}), limits=Fault(max_restarts=0))

    async def work() -> None:
        await rig.end_save(await rig.begin_save(0))
        with pytest.raises(WorkerDied, match="rank 1 died") as caught:
            await rig.step(1)
        assert "fault.max_restarts" in caught.value.why

    run(rig, work)


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
