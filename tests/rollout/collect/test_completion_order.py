"""Tests of training on what is done first: the bounds of staleness and of groups in flight hold,
nothing is trained on twice or lost, whatever the order in which samples arrive."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.core.errors import MilesError, WaitTimeout, WorkerDied
from milescli.core.types import Group, Prompt, WeightVersion
from milescli.rollout.base import Completion, GenerateRequest
from milescli.rollout.collect.collector import sampling_seed
from milescli.rollout.collect.completion_order import MAX_RETRIES, CompletionOrderCollector
from milescli.rollout.collect.journal import Journal, NoJournal
from milescli.rollout.collect.prefetching import open_collector
from milescli.rollout.collect.rollout_stats import staleness_of
from tests.rollout.engines import ScriptedEngine, make_episodes, make_recipe, make_source

V0, V1 = WeightVersion(0), WeightVersion(1)
FOR_EVER = 10**9
STEP = 4
"""Prompts of a step."""
Delay = Callable[[GenerateRequest], int]


class Engine(ScriptedEngine):
    """Knows which prompts it is asked at once."""

    def __init__(self, *, delay: Delay) -> None:
        super().__init__(delay=delay)
        self.asked = Counter[int]()
        self.most_at_once = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        (prompt,) = request.prompt_ids
        self.asked[prompt] += 1
        self.most_at_once = max(self.most_at_once, sum(n > 0 for n in self.asked.values()))
        try:
            return await super().generate(request)
        finally:
            self.asked[prompt] -= 1


class Trainer:
    """The loop's other half: takes, works for a while, publishes. Prompt n is at position n."""

    def __init__(
        self,
        *,
        max_staleness: int = 1,
        delay: Delay = lambda _: 3,
        journal: Journal | None = None,
        **rollout: object,
    ) -> None:
        self.engine = Engine(delay=delay)
        self.source = make_source(10_000)
        rollout = {"order": "done", "stale_groups": "retry", **rollout}
        recipe = make_recipe(max_staleness=max_staleness, **rollout)
        episodes = make_episodes(self.engine)
        collector = open_collector(self.source, episodes, recipe=recipe, journal=journal)
        assert isinstance(collector, CompletionOrderCollector)
        self.collector = collector
        self.steps: list[list[Group]] = []
        self.staleness: list[int] = []
        self.refused: list[int] = []
        self.num_stale = self.num_wasted = 0

    async def take(self, step: int, version: WeightVersion) -> list[int]:
        """The prompts of a step."""
        groups = await self.collector.take(step, version=version)
        self.steps.append(groups)
        self.staleness += [staleness_of(group, version) for group in groups]
        self.refused += [group.prompt.index for group in self.collector.refused]
        self.num_stale += self.collector.flow.stale_groups
        self.num_wasted += self.collector.flow.wasted_tokens
        return [group.prompt.index for group in groups]

    def publish(self, version: int) -> WeightVersion:
        self.engine.version = WeightVersion(version)
        self.collector.on_published(self.engine.version)
        return self.engine.version

    async def run(self, steps: int, *, work: Callable[[], int] = lambda: 20) -> None:
        """`work`: turns of the event loop that a training step takes."""
        version = V0
        self.collector.start(version=version, first_step=1, last_step=steps)
        for step in range(1, steps + 1):
            await self.take(step, version)
            for _ in range(work()):
                await asyncio.sleep(0)
            version = self.publish(version + 1)
        await self.collector.stop()
        assert len(asyncio.all_tasks()) == 1, "a task was left behind"

    @property
    def trained(self) -> list[int]:
        return [group.prompt.index for groups in self.steps for group in groups]


def _long_tailed(rng: random.Random) -> Delay:
    return lambda _: min(int(rng.lognormvariate(2.0, 1.2)), 400)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 2**32).map(random.Random),
    st.sampled_from(["none", "zero_variance", "pass_rate"]),
    st.sampled_from(["retry", "drop", "wait"]),
)
def test_the_bounds_hold_and_no_prompt_is_trained_on_twice_or_lost(
    max_staleness: int, rng: random.Random, kind: str, stale_groups: str
) -> None:
    bounds = {"pass_rate_low": 2.0, "pass_rate_high": 7.0} if kind == "pass_rate" else {}
    trainer = Trainer(
        max_staleness=max_staleness,
        delay=_long_tailed(rng),
        filter=kind,
        stale_groups=stale_groups,
        max_filter_rounds=99,
        **bounds,
    )
    asyncio.run(trainer.run(8, work=lambda: rng.randrange(40)))
    assert [len(groups) for groups in trainer.steps] == [STEP] * 8
    assert min(trainer.staleness) >= 0 and max(trainer.staleness) <= max_staleness
    assert trainer.engine.most_at_once <= STEP * (max_staleness + 1)
    settled = [*trainer.trained, *trainer.refused]
    assert len(settled) == len(set(settled)), "a prompt was settled twice"
    position, taken = trainer.collector.position, trainer.collector.taken
    assert set(settled) <= {*range(position), *taken}
    left_out = {*range(position), *taken} - set(settled)
    assert len(left_out) <= trainer.num_stale, "a prompt was lost"
    assert not left_out or stale_groups == "drop" or trainer.num_stale > MAX_RETRIES
    assert stale_groups != "wait" or trainer.num_stale <= STEP
    assert kind == "none" or not trainer.refused or trainer.collector.stats.num_groups == STEP


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(0, 2**32).map(random.Random))
def test_rollout_never_runs_beyond_what_the_trainer_may_still_take(
    max_staleness: int, rng: random.Random
) -> None:
    async def run() -> None:
        trainer = Trainer(max_staleness=max_staleness)
        version, bound = V0, STEP * (max_staleness + 1)
        trainer.collector.start(version=version, first_step=1, last_step=99)
        for step in range(1, 6):
            for _ in range(rng.choice([0, 200])):
                await asyncio.sleep(0)
            assert trainer.source.position <= bound
            await trainer.take(step, version)
            for _ in range(rng.choice([0, 200])):
                await asyncio.sleep(0)
            assert trainer.source.position <= bound
            version, bound = trainer.publish(version + 1), bound + STEP
        await asyncio.sleep(0)
        assert trainer.source.position == bound, "it is held back too early"
        await trainer.collector.stop()

    asyncio.run(run())


class SlowToRead(NoJournal):
    """Has what was recorded in memory, and gives it after many turns of the event loop."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}

    def record_group(self, position: int, group: Group) -> None:
        self.groups[position] = group

    def has_group(self, step: int, position: int) -> bool:
        return position in self.groups

    async def group(self, step: int, position: int, prompt: Prompt) -> Group | None:
        if (known := self.groups.get(position)) is not None:
            for _ in range(200 - position):
                await asyncio.sleep(0)
        return known


def test_what_the_journal_has_is_taken_before_new_groups_that_are_done_sooner() -> None:
    async def told() -> None:
        journal = SlowToRead()
        killed = Trainer(max_staleness=1, journal=journal)
        killed.collector.start(version=V0, first_step=1, last_step=4)
        await killed.take(1, V0)
        await killed.collector.stop()
        held = {*range(STEP - 1)} & {*journal.groups}
        assert held
        journal.groups = {at: journal.groups[at] for at in held}
        again = Trainer(max_staleness=1, journal=journal, delay=lambda _: 0)
        again.collector.start(version=V0, first_step=1, last_step=4)
        assert held <= {*await again.take(1, V0)} and not held & {*again.engine.asked}
        await again.collector.stop()

    asyncio.run(told())


def test_a_straggler_holds_no_step_up() -> None:
    async def run() -> None:
        trainer = Trainer(delay=lambda request: FOR_EVER if request.prompt_ids == [1] else 3)
        trainer.collector.start(version=V0, first_step=1, last_step=9)
        assert await trainer.take(1, V0) == [0, 2, 3, 4]
        assert trainer.collector.position == 1 and trainer.collector.taken == [2, 3, 4]
        trainer.publish(1)
        assert await trainer.take(2, V1) == [5, 6, 7, 8]
        assert trainer.staleness == [0, 0, 0, 0, 1, 1, 1, 0]
        await trainer.collector.stop()
        assert trainer.source.position == trainer.collector.position == 1
        assert trainer.collector.taken == list(range(2, 9))

    asyncio.run(run())


def test_a_group_that_becomes_too_old_is_begun_anew_by_the_same_seeds_three_times_at_most() -> None:
    async def run() -> None:
        trainer = Trainer(delay=lambda request: FOR_EVER if request.prompt_ids == [1] else 3)
        trainer.collector.start(version=V0, first_step=1, last_step=30)
        version = V0
        for step in range(1, 16):
            await trainer.take(step, version)
            version = trainer.publish(version + 1)
        seeds = [r.seed for r in trainer.engine.requests if r.prompt_ids == [1]]
        assert seeds == [sampling_seed(0, 1, index) for index in range(3)] * (1 + MAX_RETRIES)
        assert trainer.num_stale == 1 + MAX_RETRIES and trainer.collector.position > 1
        await trainer.collector.stop()

    asyncio.run(run())


def test_a_group_that_becomes_too_old_is_left_out_where_the_recipe_says_so() -> None:
    async def run() -> None:
        trainer = Trainer(
            delay=lambda request: FOR_EVER if request.seed == sampling_seed(0, 1, 2) else 3,
            stale_groups="drop",
        )
        trainer.collector.start(version=V0, first_step=1, last_step=30)
        version = V0
        for step in range(1, 5):
            await trainer.take(step, version)
            version = trainer.publish(version + 1)
        assert 1 not in trainer.trained and trainer.collector.position > 1
        # of three samples two were done, a token each
        assert (trainer.num_stale, trainer.num_wasted) == (1, 2)
        assert len([r for r in trainer.engine.requests if r.prompt_ids == [1]]) == 3
        await trainer.collector.stop()

    asyncio.run(run())


def test_a_straggler_is_waited_for_by_the_last_step_that_can_take_it() -> None:
    async def run() -> None:
        rng = random.Random(0)
        trainer = Trainer(
            max_staleness=2,
            delay=lambda request: 900 if request.prompt_ids == [1] else rng.randrange(9),
            stale_groups="wait",
        )
        await trainer.run(5, work=lambda: 0)
        places = [[group.prompt.index for group in groups] for groups in trainer.steps]
        assert 1 in places[2] and trainer.num_stale == 0
        assert sorted(trainer.trained) == list(range(5 * STEP))

    asyncio.run(run())


def test_nothing_is_made_beyond_the_last_step() -> None:
    trainer = Trainer(max_staleness=3)
    asyncio.run(trainer.run(5))
    assert sorted(trainer.trained) == list(range(5 * STEP))
    assert len(trainer.engine.requests) == 5 * STEP * 3


def test_an_error_is_raised_at_the_next_step() -> None:
    async def run() -> None:
        trainer = Trainer()
        error = WorkerDied("engine 0 died", why="signal 9", fix="resume")
        trainer.engine.fail_on = lambda request: error if request.prompt_ids == [9] else None
        with pytest.raises(WorkerDied) as raised:
            await trainer.run(3)
        assert raised.value is error and 9 not in trainer.trained
        await trainer.collector.stop()
        assert trainer.engine.num_running == 0

    asyncio.run(run())


def test_a_wait_that_reaches_its_bound_says_what_is_there() -> None:
    async def run() -> None:
        trainer = Trainer(delay=lambda _: FOR_EVER)
        recipe = make_recipe(timeout_s=0.05, order="done", max_staleness=1)
        collector = open_collector(trainer.source, make_episodes(trainer.engine), recipe=recipe)
        collector.start(version=V0, first_step=1, last_step=2)
        with pytest.raises(WaitTimeout, match="of step 1") as raised:
            await collector.take(1, version=V0)
        assert "0 of 24 samples were complete" in raised.value.why
        await collector.stop()

    asyncio.run(run())


def test_a_filter_that_refuses_everything_ends_the_run() -> None:
    async def run() -> None:
        trainer = Trainer(filter="pass_rate", pass_rate_low=99.0, pass_rate_high=100.0)
        trainer.collector.start(version=V0, first_step=1, last_step=9)
        with pytest.raises(MilesError, match="left too few groups for step 1") as raised:
            await trainer.take(1, V0)
        assert "0 of 4 after 8 rounds" in raised.value.why
        await trainer.collector.stop()

    asyncio.run(run())


def test_a_step_that_is_cancelled_takes_nothing() -> None:
    async def taken_after(turns: int) -> bool:
        trainer = Trainer()
        trainer.collector.start(version=V0, first_step=1, last_step=9)
        task = asyncio.ensure_future(trainer.collector.take(1, version=V0))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert trainer.collector.position == (0 if task.cancelled() else STEP)
        if task.cancelled():
            assert await trainer.take(1, V0) == [0, 1, 2, 3]
        await trainer.collector.stop()
        return not task.cancelled()

    outcomes = {asyncio.run(taken_after(turns)) for turns in range(0, 60, 2)}
    assert False in outcomes
