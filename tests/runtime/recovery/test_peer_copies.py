"""New ranks take the newer of copy and checkpoint, and do again what follows it. Ranks and keepers
are stand-ins; real ones die in tests/end_to_end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from milescli.core.errors import WorkerDied
from milescli.core.events import Notice, WorkerLost, WorkerReplaced
from milescli.recipe.machine import Fault
from tests.runtime.recovery.copied_ranks import CopiedRanks, CopiedRig
from tests.runtime.recovery.dying_ranks import read, run
from tests.runtime.recovery.test_healing_trainer import batch_of

pytestmark = pytest.mark.usefixtures("a_second_a_look")


def test_new_ranks_begin_from_the_copy_that_is_newer_than_the_checkpoint(tmp_path: Path) -> None:
    rig = CopiedRig(tmp_path, first=CopiedRanks(dies_in={"step": 6}), every=2)

    async def work() -> None:
        await rig.begin()
        await rig.steps(1, 2)
        await rig.end_save(await rig.begin_save(2))
        await rig.steps(3, 4, 5, 6)

    run(rig, work)
    assert rig.ranks.weights == [1, 2, 3, 4, 5, 6] and rig.bare == 1
    assert rig.sources == ["from the copy in memory, 1 step repeated"]


def test_new_ranks_begin_from_the_checkpoint_that_is_newer_than_the_copy(tmp_path: Path) -> None:
    rig = CopiedRig(tmp_path, first=CopiedRanks(dies_in={"step": 6}), every=4)

    async def work() -> None:
        await rig.begin()
        await rig.steps(1, 2, 3, 4, 5)
        await rig.end_save(await rig.begin_save(5))
        rig.first.dies_in = {"publish": 1}
        await rig.trainer.connect_engines([], "rollout")
        await rig.trainer.publish(1, "rollout")  # type: ignore[arg-type]

    run(rig, work)
    assert rig.ranks.weights == [1, 2, 3, 4, 5] and rig.bare == 0
    assert rig.sources == [""], "nothing was done again"


def test_ranks_that_die_while_a_copy_is_on_its_way_begin_from_the_one_before(
    tmp_path: Path,
) -> None:
    """Whoever looks after the keepers just then is not stopped with the copy."""
    rig, looks = CopiedRig(tmp_path), list[asyncio.Task[None]]()

    async def work() -> None:
        await rig.begin()
        await rig.steps(1, 2)
        rig.keepers[0].ranks[1].slow = asyncio.Event()
        await rig.step(3)
        await rig.settle()
        assert rig.copies._sending is not None
        rig.copies._sending.add_done_callback(
            lambda _: looks.append(asyncio.ensure_future(rig.copies.probe()))
        )
        rig.first.dies_in = {"step": 1}
        await rig.step(4)
        await asyncio.gather(*looks)

    run(rig, work)
    assert len(looks) == 1
    assert rig.ranks.weights == [1, 2, 3, 4]
    assert rig.sources == ["from the copy in memory, 1 step repeated"], "the third, not two"


@pytest.mark.parametrize("dies_in", [{"take_copy": 3}, {"step": 4}])
def test_ranks_that_die_of_a_copy_are_found_by_the_next_call(tmp_path: Path, dies_in) -> None:
    rig = CopiedRig(tmp_path, first=CopiedRanks(dies_in=dies_in))

    async def work() -> None:
        await rig.begin()
        await rig.steps(1, 2, 3, 4, 5)

    run(rig, work)
    assert rig.ranks.weights == [1, 2, 3, 4, 5] and rig.kinds == [WorkerLost, WorkerReplaced]


def test_a_checkpoint_that_was_being_written_is_that_of_its_step_from_a_copy_too(
    tmp_path: Path,
) -> None:
    """No copy is taken meanwhile: one that is newer could not write it."""
    rig = CopiedRig(tmp_path, first=CopiedRanks(dies_in={"step": 5}))

    async def work() -> None:
        await rig.begin()
        await rig.steps(1, 2)
        pending = await rig.begin_save(2)
        await rig.steps(3, 4, 5)
        await rig.end_save(pending)

    run(rig, work)
    assert read(tmp_path / "step_2") == [1, 2]
    assert rig.ranks.weights == [1, 2, 3, 4, 5] and rig.bare == 1
    assert rig.sources == ["from the copy in memory, 2 steps repeated"]


def test_a_keeper_that_dies_is_replaced_and_a_copy_taken_at_the_next_step(tmp_path: Path) -> None:
    rig = CopiedRig(tmp_path, every=3)

    async def work() -> None:
        await rig.begin()
        await rig.steps(1, 2, 3)
        rig.keepers[0].ranks[0].is_dead = True
        await rig.trainer.probe()
        await rig.settle()
        assert rig.copies.mark is None
        await rig.steps(4)
        assert rig.copies.mark == 4
        rig.first.dies_in = {"step": 1}
        await rig.steps(5)

    run(rig, work)
    assert len(rig.keepers) == 2 and rig.ranks.weights == [1, 2, 3, 4, 5]
    assert rig.kinds == [WorkerLost, WorkerReplaced] * 2
    assert rig.events[0].worker == "copy keeper"  # type: ignore[attr-defined]


def test_a_keeper_that_dies_while_ranks_take_a_copy_is_sent_nothing(tmp_path: Path) -> None:
    rig = CopiedRig(tmp_path, every=2)

    async def work() -> None:
        await rig.begin()
        await rig.steps(1)
        rig.first.slow, rig.slow_start = asyncio.Event(), asyncio.Event()
        step = asyncio.ensure_future(rig.step(2))
        await rig.settle()
        rig.keepers[0].ranks[0].is_dead = True
        await rig.trainer.probe()
        assert not step.done()
        rig.first.slow.set()
        await step
        await rig.settle()
        await rig.trainer.probe()
        assert rig.copies.mark is None
        rig.slow_start.set()
        await rig.settle()
        await rig.steps(3)
        assert rig.copies.mark == 3

    run(rig, work)
    assert rig.kinds == [WorkerLost, WorkerReplaced] and len(rig.keepers) == 2


def test_a_copy_that_fails_though_nobody_died_is_told_and_tried_again_when_it_is_time(
    tmp_path: Path,
) -> None:
    rig = CopiedRig(tmp_path, every=2)

    async def work() -> None:
        await rig.begin()
        keeper = rig.keepers[0].ranks[0]
        keeper.held, well = SimpleNamespace(begin=_fails), keeper.held
        await rig.steps(1, 2)
        assert rig.copies.mark is None
        keeper.held = well
        await rig.steps(3, 4)
        assert rig.copies.mark == 4

    run(rig, work)
    assert rig.kinds == [Notice] and "no memory" in rig.events[0].text  # type: ignore[attr-defined]


def _fails(*_: object, **__: object) -> None:
    raise WorkerDied("copy keeper 0 failed in `begin`", why="no memory", fix="none")


def test_a_keeper_that_dies_with_the_ranks_leaves_the_checkpoint(tmp_path: Path) -> None:
    rig = CopiedRig(tmp_path, first=CopiedRanks(dies_in={"step": 4}))

    async def work() -> None:
        await rig.begin()
        await rig.steps(1)
        await rig.end_save(await rig.begin_save(1))
        await rig.steps(2, 3)
        rig.keepers[0].ranks[1].is_dead = True
        real = rig.keepers[0].ranks[1].hand_over
        rig.keepers[0].ranks[1].hand_over = _raises(real)  # type: ignore[method-assign]
        await rig.steps(4)

    run(rig, work)
    assert rig.ranks.weights == [1, 2, 3, 4] and rig.bare == 1
    assert rig.sources == ["from the newest checkpoint, 2 steps repeated"]


def _raises(_: object):
    def hand_over(*_: object) -> None:
        raise WorkerDied("copy keeper 1 died", why="planted", fix="none")

    return hand_over


def test_beyond_the_bound_copies_are_no_longer_taken_and_the_run_goes_on(tmp_path: Path) -> None:
    rig = CopiedRig(tmp_path, limits=Fault(max_restarts=0))

    async def work() -> None:
        await rig.begin()
        await rig.steps(1)
        rig.keepers[0].ranks[0].is_dead = True
        await rig.trainer.probe()
        await rig.steps(2)
        await rig.trainer.probe()

    run(rig, work)
    assert rig.kinds == [Notice] and "no further copies" in rig.events[0].text  # type: ignore[attr-defined]


def _rig_of_large_batches(tmp_path: Path, *, every: int) -> CopiedRig:
    """Of two batches only one can be kept; copies are empty, so that new ranks know none of what
    was done before."""

    async def take_copy() -> list[list[int]]:
        return [[0], [0]]

    both = CopiedRanks(), CopiedRanks()
    for ranks in both:
        ranks.take_copy = take_copy  # type: ignore[method-assign]
    limits = Fault(kept_gib=1.0)
    return CopiedRig(tmp_path, first=both[0], then=[both[1]], limits=limits, every=every)


def test_a_copy_makes_whole_again_what_was_too_much_to_keep(tmp_path: Path) -> None:
    rig, large = _rig_of_large_batches(tmp_path, every=2), batch_of(3 * 2**28)

    async def work() -> None:
        await rig.begin()
        await rig.steps(large, large, large)  # type: ignore[arg-type]
        rig.first.dies_in = {"step": 1}
        await rig.steps(4)

    run(rig, work)
    assert rig.kinds == [Notice, WorkerLost, WorkerReplaced]
    assert "until the next checkpoint or copy" in rig.events[0].text  # type: ignore[attr-defined]
    assert rig.ranks.weights == [large, 4]
    assert rig.sources == ["from the copy in memory, 1 step repeated"]


def test_a_copy_that_is_lost_is_told_where_batches_before_it_were_let_go(tmp_path: Path) -> None:
    rig, large = _rig_of_large_batches(tmp_path, every=1), batch_of(3 * 2**28)

    async def work() -> None:
        await rig.begin()
        await rig.steps(large, large, large)  # type: ignore[arg-type]
        assert rig.events == []
        rig.keepers[0].ranks[0].is_dead = True
        await rig.trainer.probe()
        rig.first.is_dead = True
        with pytest.raises(WorkerDied, match="rank 1 died"):
            await rig.trainer.probe()
        await rig.settle()

    run(rig, work)
    assert rig.kinds == [WorkerLost, Notice, WorkerReplaced]
    assert "the copy is lost" in rig.events[1].text  # type: ignore[attr-defined]
