"""Calls of all ranks at once; and ranks that hang are shown, then replaced as dead ones are. Ranks
are stand-ins."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from milescli.core.errors import WaitTimeout
from milescli.core.events import WorkerLost, WorkerReplaced, WorkerSilent
from milescli.plan.types import TrainerLayout
from milescli.runtime.recovery.rank_group import RankGroup
from milescli.train.base import StepResult, TrainBatch
from tests.runtime.recovery.dying_ranks import Ranks, Rig, run
from tests.waiting import until_async

pytestmark = pytest.mark.usefixtures("a_second_a_look")


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

        async def is_done() -> bool:
            await rig.trainer.probe()
            return stepping.done()

        await until_async(is_done)

    run(rig, work)
    assert rig.kinds == [WorkerSilent, WorkerLost, WorkerReplaced]
    assert rig.events[0].worker == "trainer rank 1"  # type: ignore[attr-defined]
    assert "trainer rank 1 has been silent" in rig.events[1].what  # type: ignore[attr-defined]
    assert rig.ranks.weights == [1]


def test_a_step_that_takes_much_longer_than_any_before_counts_as_hung(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    hung = asyncio.Event()

    async def work() -> None:
        await rig.step(1)
        rig.first.step = lambda *_, **__: hung.wait()  # type: ignore[method-assign,assignment]
        stepping = asyncio.ensure_future(rig.trainer.step(2, lr=0.1))  # type: ignore[arg-type]

        async def is_dead() -> bool:
            await rig.trainer.probe()
            return rig.first.is_dead

        await until_async(is_dead)
        rig.first.step = Ranks.step.__get__(rig.first)  # type: ignore[method-assign]
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)

    run(rig, work)
    assert "`step`" in rig.events[0].why  # type: ignore[attr-defined]
    assert rig.first.is_dead


class _Rank:
    """Stands for an ActorHandle: notes what it is called with."""

    name, log_path = "trainer rank 0", None

    def __init__(self) -> None:
        self.calls = list[tuple[str, tuple[Any, ...], dict[str, Any]]]()

    async def run(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> StepResult:
        self.calls.append((method, args, kwargs))
        return StepResult(report=None, logprobs={len(self.calls): None}, memory=(self.name,))  # type: ignore[arg-type,dict-item]


class _Cluster:
    async def put(self, shard: str) -> str:
        return f"{shard} in shared memory"


def test_each_rank_is_given_its_shard_and_what_they_return_is_joined() -> None:
    ranks = [_Rank(), _Rank()]
    group = RankGroup(
        cluster=_Cluster(),  # type: ignore[arg-type]
        ranks=ranks,  # type: ignore[arg-type]
        pids=[1, 2],
        layout=TrainerLayout(tp=1, dp=2),
        step_timeout_s=60.0,
    )
    batch = TrainBatch(shards=["first", "second"])  # type: ignore[list-item]
    stepped = asyncio.run(group.step(batch, lr=0.1))
    assert stepped.memory == ("trainer rank 0",) * 2
    assert [rank.calls for rank in ranks] == [
        [("step", (f"{shard} in shared memory",), {"lr": 0.1, "critic_lr": None})]
        for shard in ("first", "second")
    ]
