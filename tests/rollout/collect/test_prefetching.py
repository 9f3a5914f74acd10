"""Tests of running ahead: the staleness bound is kept and used, order and position survive, nothing
is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.core.errors import WorkerDied
from milescli.core.types import WeightVersion
from milescli.data.file_prompts import FilePrompts
from milescli.rollout.base import GenerateRequest
from milescli.rollout.collect.collector import Collector
from milescli.rollout.collect.prefetching import PrefetchingCollector, open_collector
from tests.rollout.engines import ScriptedEngine, make_episodes, make_recipe, make_source


class Trainer:
    """The loop's other half: takes, works for a while, publishes."""

    def __init__(
        self,
        *,
        max_staleness: int,
        delay: Callable[[GenerateRequest], int] = lambda _: 3,
        **rollout: object,
    ) -> None:
        self.engine = ScriptedEngine(delay=delay)
        self.source: FilePrompts = make_source()
        recipe = make_recipe(max_staleness=max_staleness, **rollout)
        self.collector = open_collector(self.source, make_episodes(self.engine), recipe=recipe)
        self.prompts: list[int] = []
        self.staleness: list[int] = []
        self.positions: list[int] = []

    async def run(
        self, steps: int, *, work: Callable[[], int] = lambda: 20, first_step: int = 1
    ) -> None:
        """`work`: turns of the event loop that a training step takes."""
        version = self.engine.version = WeightVersion(first_step - 1)
        last = first_step + steps - 1
        self.collector.start(version=version, first_step=first_step, last_step=last)
        for step in range(first_step, last + 1):
            groups = await self.collector.take(step, version=version)
            self.prompts += [group.prompt.index for group in groups]
            self.staleness.append(self.collector.stats.staleness_max)
            for _ in range(work()):
                await asyncio.sleep(0)
            version = self.engine.version = WeightVersion(version + 1)
            self.collector.on_published(version)
            self.positions.append(self.collector.position)
        await self.collector.stop()
        assert len(asyncio.all_tasks()) == 1, "a task was left behind"


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 4), st.randoms(use_true_random=False), st.sampled_from(["none", "zero_variance"])
)
def test_no_group_is_ever_older_than_the_bound(
    max_staleness: int, rng: random.Random, kind: str
) -> None:
    trainer = Trainer(max_staleness=max_staleness, delay=lambda _: rng.randrange(30), filter=kind)
    asyncio.run(trainer.run(8, work=lambda: rng.randrange(40)))
    assert len(trainer.staleness) == 8 and max(trainer.staleness) <= max_staleness


def test_the_bound_is_used_where_the_trainer_is_slow() -> None:
    trainer = Trainer(max_staleness=2)
    asyncio.run(trainer.run(8))
    assert trainer.staleness == [0, 1, 2, 2, 2, 2, 2, 2]


def test_what_is_ready_and_what_held_rollout_back_are_told() -> None:
    async def run() -> None:
        trainer = Trainer(max_staleness=2)
        trainer.collector.start(version=WeightVersion(0), first_step=1, last_step=9)
        async with asyncio.timeout(300):
            while len(asyncio.all_tasks()) > 1:  # this one: all that may be collected is there
                await asyncio.sleep(0)
        await trainer.collector.take(1, version=WeightVersion(0))
        flow = trainer.collector.flow
        assert flow.waiting_groups == 8 and flow.stale_groups == flow.wasted_tokens == 0
        assert flow.idle_s > 0 and flow.running_mean > 0
        await trainer.collector.stop()

    asyncio.run(run())


def test_the_strict_loop_is_fresh_at_every_step() -> None:
    trainer = Trainer(max_staleness=0)
    assert isinstance(trainer.collector, Collector)
    asyncio.run(trainer.run(5))
    assert trainer.staleness == [0] * 5


def test_a_bound_of_zero_makes_the_ahead_collector_strict_too() -> None:
    trainer = Trainer(max_staleness=0)
    trainer.collector = PrefetchingCollector(
        trainer.collector, trainer.source, max_staleness=0, overlap=True
    )  # type: ignore[arg-type]
    asyncio.run(trainer.run(5))
    assert trainer.staleness == [0] * 5


def test_prompts_are_trained_on_in_order_and_nothing_is_made_beyond_the_last_step() -> None:
    trainer = Trainer(max_staleness=3, delay=lambda request: 40 - 10 * (request.prompt_ids[0] % 4))
    asyncio.run(trainer.run(5))
    assert trainer.prompts == [n % 10 for n in range(20)]
    assert len(trainer.engine.requests) == 5 * 12


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_the_position_is_that_of_the_oldest_prompt_not_trained_on(max_staleness: int) -> None:
    trainer = Trainer(max_staleness=max_staleness)
    asyncio.run(trainer.run(4))
    assert trainer.positions == [4, 8, 12, 16]


def test_stop_cancels_what_runs_and_goes_back_to_what_was_not_taken() -> None:
    async def run() -> None:
        trainer = Trainer(
            max_staleness=2, delay=lambda request: 0 if request.prompt_ids[0] < 4 else 10**9
        )
        trainer.collector.start(version=WeightVersion(0), first_step=1, last_step=9)
        await trainer.collector.take(1, version=WeightVersion(0))
        # three samples of prompts 4 to 9; 0 and 1, of the next epoch, are done
        assert trainer.engine.num_running == 18
        await trainer.collector.stop()
        assert trainer.engine.num_running == 0 and trainer.source.position == 4
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_an_error_behind_the_trainers_back_is_raised_at_its_own_step() -> None:
    async def run() -> None:
        trainer = Trainer(max_staleness=1)
        error = WorkerDied("engine 0 died", why="signal 9", fix="resume")
        trainer.engine.fail_on = lambda request: error if request.prompt_ids == [5] else None
        with pytest.raises(WorkerDied) as raised:
            await trainer.run(3)
        assert (
            raised.value is error
            and trainer.prompts == [0, 1, 2, 3]
            and trainer.collector.position == 4
        )
        await trainer.collector.stop()
        assert trainer.engine.num_running == 0

    asyncio.run(run())


def test_with_a_filter_batches_take_their_prompts_one_after_the_other() -> None:
    async def run() -> None:
        trainer = Trainer(max_staleness=2, filter="zero_variance", delay=lambda _: 10**9)
        trainer.collector.start(version=WeightVersion(0), first_step=1, last_step=9)
        for _ in range(20):
            await asyncio.sleep(0)
        assert trainer.engine.num_running == 12
        await trainer.collector.stop()

    asyncio.run(run())


def test_a_step_at_a_version_that_was_never_published_is_a_fault_of_ours() -> None:
    async def run() -> None:
        trainer = Trainer(max_staleness=1)
        trainer.collector.start(version=WeightVersion(0), first_step=1, last_step=4)
        await trainer.collector.take(1, version=WeightVersion(0))
        with pytest.raises(AssertionError, match="was not published"):
            await trainer.collector.take(2, version=WeightVersion(1))
        await trainer.collector.stop()

    asyncio.run(run())
