"""Tests of one step's collecting: order, seeds, filter rounds, first error, bounds, resume. The
engine fails on demand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from milescli.core.errors import MilesError, RewardError, WaitTimeout, WorkerDied
from milescli.core.types import Group, Prompt, WeightVersion
from milescli.recipe.schema import Recipe
from milescli.rollout.base import GenerateRequest
from milescli.rollout.collect.collector import Collector, Progress, sampling_seed
from milescli.rollout.collect.prefetching import open_collector
from milescli.train.objectives import load_objective
from tests.rollout.engines import (
    ScriptedEngine,
    make_episodes,
    make_recipe,
    make_scorer,
    make_source,
)
from tests.samples import make_group, make_sample, make_trajectory

V0 = WeightVersion(0)


def _collector(engine: ScriptedEngine, **options: object) -> Collector:
    source = options.pop("source", None) or make_source()
    episodes = make_episodes(engine, scorer=options.pop("scorer", None))  # type: ignore[arg-type]
    return Collector(source, episodes, recipe=make_recipe(**options))  # type: ignore[arg-type]


def _take(collector: Collector, steps: int = 1) -> list[list[Group]]:
    async def run() -> list[list[Group]]:
        taken = [await collector.take(step, version=V0) for step in range(1, steps + 1)]
        assert len(asyncio.all_tasks()) == 1, "a task was left behind"
        return taken

    return asyncio.run(run())


def _failing(collector: Collector, kind: type[Exception]) -> Exception:
    async def run() -> Exception:
        with pytest.raises(kind) as error:
            await collector.take(1, version=V0)
        assert len(asyncio.all_tasks()) == 1, "a task was left behind"
        return error.value

    return asyncio.run(run())


def test_groups_do_not_depend_on_the_order_in_which_samples_arrive() -> None:
    rng = random.Random(0)
    slow_first = _take(
        _collector(ScriptedEngine(delay=lambda request: 50 - 10 * request.prompt_ids[0] % 50)),
        steps=3,
    )
    shuffled = _take(_collector(ScriptedEngine(delay=lambda _: rng.randrange(40))), steps=3)
    assert slow_first == shuffled
    assert [group.prompt.index for step in shuffled for group in step] == [
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        0,
        1,
    ]
    assert [group.epoch for group in shuffled[2]] == [0, 0, 1, 1]
    assert all(
        [sample.sample_index for sample in group.samples] == [0, 1, 2]
        for step in shuffled
        for group in step
    )


def test_all_samples_of_a_step_are_asked_for_before_the_first_is_there() -> None:
    seen = []
    engine = ScriptedEngine(delay=lambda _: 20)
    engine.fail_on = lambda _: seen.append(len(engine.requests))  # type: ignore[func-returns-value,assignment]
    _take(_collector(engine))
    assert seen[0] == 12


def test_seeds_are_fixed_by_run_position_and_sample_and_never_repeat() -> None:
    seeds = {
        sampling_seed(run, position, sample)
        for run in range(3)
        for position in range(100)
        for sample in range(8)
    }
    assert len(seeds) == 2400 and max(seeds) < 2**31
    assert sampling_seed(0, 0, 0) == 1_159_696_137  # on every machine


def test_a_prompt_that_returns_in_the_next_epoch_is_sampled_with_other_seeds() -> None:
    first, second = _take(_collector(ScriptedEngine(), source=make_source(4)), steps=2)
    assert first[0].prompt == second[0].prompt
    assert first[0].samples[0].seed != second[0].samples[0].seed


def test_a_resumed_collector_goes_on_with_the_same_groups() -> None:
    straight = _take(_collector(ScriptedEngine()), steps=3)
    source = make_source()
    source.seek(8)
    assert _take(_collector(ScriptedEngine(), source=source))[0] == straight[2]


@pytest.mark.parametrize(
    "error", [WorkerDied("engine 0 died", why="signal 9", fix="resume"), KeyError("bug")]
)
def test_the_first_error_wins_and_everything_else_is_cancelled(error: Exception) -> None:
    engine = ScriptedEngine(delay=lambda request: 5 if request.prompt_ids == [2] else 10_000)
    engine.fail_on = lambda request: error
    collector = _collector(engine)
    assert _failing(collector, type(error)) is error
    assert engine.num_running == 0
    assert collector.position == 0


def test_a_reward_that_raises_stops_the_step() -> None:
    async def broken(*, prompt: str, response: str, label: str | None) -> float:
        raise ZeroDivisionError

    assert "ZeroDivisionError" in str(
        _failing(_collector(ScriptedEngine(), scorer=make_scorer(broken)), RewardError)
    )


def test_an_engine_that_never_answers_is_given_up_and_the_wait_is_named() -> None:
    engine = ScriptedEngine(delay=lambda request: 0 if request.prompt_ids == [0] else 10**9)
    error = _failing(_collector(engine, timeout_s=0.2), WaitTimeout)
    assert "step 1" in str(error) and "3 of 12 samples" in str(error)
    assert engine.num_running == 0


def test_a_response_that_the_engine_gave_up_stops_the_step() -> None:
    class Aborting(ScriptedEngine):
        async def generate(self, request: GenerateRequest):
            from dataclasses import replace

            from milescli.core.types import StopReason

            return replace(await super().generate(request), stop_reason=StopReason.ABORT)

    assert "aborted" in str(_failing(_collector(Aborting()), WorkerDied))


def _flat_for(*flat: int) -> Callable[..., object]:
    async def reward(*, prompt: str, response: str, label: str | None) -> float:
        reward.calls += 1  # type: ignore[attr-defined]
        return 1.0 if int(prompt) in flat else float(reward.calls)  # type: ignore[attr-defined]

    reward.calls = 0  # type: ignore[attr-defined]
    return reward


def test_groups_of_equal_rewards_are_replaced_by_further_prompts() -> None:
    collector = _collector(
        ScriptedEngine(), scorer=make_scorer(_flat_for(0, 2, 4)), filter="zero_variance"
    )
    groups = _take(collector)[0]
    assert [group.prompt.index for group in groups] == [1, 3, 5, 6]
    assert collector.stats.dropped_groups == 3
    assert collector.stats.zero_variance_fraction == pytest.approx(3 / 7)
    assert collector.stats.num_groups == 4 and collector.stats.generated_tokens == 21
    assert collector.position == 7


def test_filtering_is_bounded_and_says_so() -> None:
    collector = _collector(
        ScriptedEngine(),
        scorer=make_scorer(_flat_for(*range(10))),
        filter="zero_variance",
        max_filter_rounds=3,
    )
    error = _failing(collector, MilesError)
    assert "0 of 4 after 3 rounds, 12 rejected; the mean reward is 1.000" in str(error)


class _Parts:
    """Samples groups whose rewards are equal sums, of different parts for odd prompts."""

    async def group(self, epoch: int, prompt: Prompt, position: int, progress: Progress) -> Group:
        sample = make_sample(make_trajectory([1], [2]), reward=1.0)
        parts = [{"math": 1.0}, {"form": 1.0} if prompt.index % 2 else {"math": 1.0}]
        return make_group([replace(sample, reward_parts=own) for own in parts], prompt=prompt)


def test_equal_sums_are_kept_if_the_objective_compares_their_parts() -> None:
    sizes = {"prompts_per_step": 2, "samples_per_prompt": 2}
    recipe = make_recipe(filter="zero_variance", **sizes)
    train = {"advantage": "gdpo"}
    objective = load_objective("policy", Recipe.model_validate({"train": train}))
    collector = open_collector(
        make_source(),
        make_episodes(ScriptedEngine()),
        recipe=recipe,
        compared=objective.compares,
        group_sampler=_Parts(),
    )
    (groups,) = _take(collector)
    assert [group.prompt.index for group in groups] == [1, 3]
    assert collector.stats.zero_variance_fraction == 0.5


def test_without_a_filter_flat_groups_are_kept_and_counted() -> None:
    collector = _collector(ScriptedEngine(), scorer=make_scorer(_flat_for(0)))
    assert len(_take(collector)[0]) == 4
    assert collector.stats.zero_variance_fraction == 0.25


def test_staleness_beyond_the_bound_is_a_fault_of_ours() -> None:
    async def run() -> None:
        with pytest.raises(AssertionError, match="staleness 1 at version 1, bound 0"):
            await _collector(ScriptedEngine()).take(1, version=WeightVersion(1))

    asyncio.run(run())


def test_a_cancelled_take_leaves_the_position_where_the_step_began() -> None:
    async def run() -> None:
        engine = ScriptedEngine(delay=lambda _: 10**9)
        collector = _collector(engine)
        task = asyncio.create_task(collector.take(1, version=V0))
        while engine.num_running < 12:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and collector.position == 0 and engine.num_running == 0

    asyncio.run(run())


def test_over_sampling_takes_what_is_done_first_and_gives_the_rest_up() -> None:
    slow = {1, 2}
    engine = ScriptedEngine(delay=lambda request: 10**6 if request.prompt_ids[0] in slow else 1)
    collector = _collector(engine, over_sampling=1.5)
    (groups,) = _take(collector)
    assert [group.prompt.index for group in groups] == [0, 3, 4, 5]
    assert collector.position == 6


def test_over_sampling_starts_as_many_prompts_as_its_decimal_says() -> None:
    source = make_source(100)
    collector = _collector(ScriptedEngine(), source=source, over_sampling=1.1, prompts_per_step=50)
    _take(collector)
    assert collector.position == 55, "50 * 1.1 is a little more in binary"


def test_over_sampling_replaces_what_the_filter_refuses() -> None:
    collector = _collector(
        ScriptedEngine(),
        scorer=make_scorer(_flat_for(0, 1, 2, 3)),
        filter="zero_variance",
        over_sampling=1.5,
    )
    (groups,) = _take(collector)
    assert len(groups) == 4 and not {0, 1, 2, 3} & {group.prompt.index for group in groups}
    assert collector.stats.dropped_groups == 4


def test_the_first_error_of_an_over_sampled_step_is_raised() -> None:
    async def reward(*, prompt: str, response: str, label: str | None) -> float:
        raise ValueError("no such label")

    collector = _collector(ScriptedEngine(), scorer=make_scorer(reward), over_sampling=2.0)
    assert "no such label" in str(_failing(collector, RewardError))


def test_a_greedy_response_beside_the_others_is_scored_and_not_trained_on() -> None:
    engine = ScriptedEngine()
    source = make_source()
    collector = Collector(source, make_episodes(engine), recipe=make_recipe(), with_greedy=True)
    (groups,) = _take(collector)
    assert all(len(group.samples) == 3 for group in groups)
    assert all(group.greedy_reward is not None for group in groups)
    temperatures = [request.temperature for request in engine.requests]
    assert temperatures.count(0.0) == 4 and len(temperatures) == 16


def test_filters_and_figures_see_the_rewards_before_they_are_shaped() -> None:
    collector = _collector(
        ScriptedEngine(),
        shaping="tests.rollout.collect.test_selectors:doubled",
        filter="zero_variance",
    )
    (groups,) = _take(collector)
    (plain,) = _take(_collector(ScriptedEngine(), filter="zero_variance"))
    assert [[2 * reward for reward in group.rewards] for group in plain] == [
        group.rewards for group in groups
    ]
    assert collector.stats.reward_mean == pytest.approx(
        sum(sum(group.rewards) for group in plain) / 12
    )
