"""Tests of samples that could not be scored: they are left out and counted, never scored 0, and too
many of them end the run."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from milescli.core.errors import AgentError, MilesError, RewardError, SandboxError, WorkerDied
from milescli.core.types import Group, Prompt, WeightVersion
from milescli.rollout.collect.collector import Collector, GroupSampler, Progress
from milescli.rollout.collect.journal import BatchRecord, NoJournal
from milescli.rollout.episode.unscored import UnscoredCounter
from milescli.rollout.rewards.scoring import Scorer
from tests.rollout.engines import (
    ScriptedEngine,
    digit_reward,
    make_episodes,
    make_recipe,
    make_scorer,
    make_source,
)

V0 = WeightVersion(0)
FAILED = [
    RewardError("the judge is away", why="HTTP 503", fix="wait"),
    SandboxError("the sandbox failed", why="no memory", fix="wait"),
    AgentError("the environment failed", why="it hung", fix="wait"),
]


def _failing_on(*bad: tuple[int, int], error: Exception = FAILED[0]) -> Scorer:
    """A reward that fails for some (prompt, how many of the prompt were scored before)."""
    seen: dict[int, int] = {}

    async def reward(*, prompt: str, response: str, label: str | None) -> float:
        count = seen[int(prompt)] = seen.get(int(prompt), -1) + 1
        if (int(prompt), count) in bad:
            raise error
        return await digit_reward(prompt=prompt, response=response, label=label)

    return make_scorer(reward)


class Kept(NoJournal):
    """A journal in memory."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self.batches: dict[int, BatchRecord] = {}

    def record_group(self, position: int, group: Group) -> None:
        self.groups[position] = group

    def record_batch(self, batch: BatchRecord) -> None:
        self.batches[batch.step] = batch

    def batch(self, step: int, *, start: int) -> BatchRecord | None:
        return self.batches.get(step)

    def has_group(self, step: int, position: int) -> bool:
        return position in self.groups

    async def group(self, step: int, position: int, prompt: Prompt) -> Group | None:
        return self.groups.get(position)


def _collector(
    scorer: Scorer,
    *,
    journal: Kept | None = None,
    elsewhere: GroupSampler | None = None,
    **rollout: object,
) -> Collector:
    episodes = make_episodes(ScriptedEngine(), scorer=scorer)
    recipe = make_recipe(**{"max_unscored_share": 0.3, **rollout})
    source = make_source()
    return Collector(source, episodes, recipe=recipe, journal=journal, group_sampler=elsewhere)


def _take(collector: Collector, step: int = 1) -> list[Group]:
    return asyncio.run(collector.take(step, version=V0))


@pytest.mark.parametrize("error", FAILED)
def test_a_sample_without_a_score_is_excluded_and_counted(error: MilesError) -> None:
    collector = _collector(_failing_on((2, 1), error=error))
    groups = _take(collector)
    assert [len(group.samples) for group in groups] == [3, 3, 2, 3]
    assert [sample.sample_index for sample in groups[2].samples] == [0, 2]
    assert collector.stats.figures == {"unscored_samples": 1.0}
    assert collector.stats.num_samples == 11
    whole = _collector(make_scorer())
    assert groups[0] == _take(whole)[0], "the others are what they would have been"
    assert "unscored_samples" not in whole.stats.figures


def test_a_group_of_which_one_sample_is_left_is_lost_and_the_step_goes_on_without_it() -> None:
    journal = Kept()
    collector = _collector(_failing_on((1, 0), (1, 2)), journal=journal)
    groups = _take(collector)
    assert [group.prompt.index for group in groups] == [0, 2, 3]
    assert collector.stats.figures == {"unscored_samples": 3.0}
    assert collector.position == 4, "as many prompts as the step always takes"

    again = _collector(_failing_on(), journal=journal)
    assert _take(again) == groups and again.position == 4
    assert again.stats.figures == collector.stats.figures


@pytest.mark.parametrize("selection", ["variance", "first"])
def test_a_lost_group_among_more_than_the_step_needs_costs_it_none(
    selection: str,
) -> None:
    collector = _collector(_failing_on((1, 0), (1, 2)), over_sampling=1.5, selection=selection)
    groups = _take(collector)
    assert len(groups) == 4 and 1 not in [group.prompt.index for group in groups]
    assert collector.position == 6


def test_a_step_of_which_nothing_could_be_scored_ends_the_run() -> None:
    recipe = make_recipe(max_unscored_share=0.45)
    bad = _failing_on(*((prompt, 3) for prompt in range(10)))  # the greedy response of each
    episodes = make_episodes(ScriptedEngine(), scorer=bad)
    collector = Collector(make_source(), episodes, recipe=recipe, with_greedy=True)
    with pytest.raises(RewardError):
        _take(collector)


def test_where_a_filter_replaces_groups_a_lost_one_is_replaced() -> None:
    collector = _collector(_failing_on((1, 0), (1, 2)), filter="pass_rate", pass_rate_high=9.0)
    assert len(_take(collector)) == 4


def test_more_than_the_share_ends_the_run_with_the_last_error_and_the_count() -> None:
    collector = _collector(_failing_on((0, 0), (1, 0), (2, 0), (3, 0)))
    with pytest.raises(RewardError) as raised:
        _take(collector)
    assert raised.value.what == FAILED[0].what and raised.value.fixes == FAILED[0].fixes
    assert "4 of 12 samples of step 1 could not be scored" in raised.value.why
    assert collector.position == 0


def test_each_step_has_its_own_count() -> None:
    collector = _collector(_failing_on((0, 0), (1, 0), (2, 0), (4, 0), (5, 0), (6, 0)))
    assert sum(len(group.samples) for group in _take(collector, 1)) == 9
    assert sum(len(group.samples) for group in _take(collector, 2)) == 9


def test_share_0_stops_at_the_first_with_its_own_error() -> None:
    with pytest.raises(RewardError) as raised:
        _take(_collector(_failing_on((3, 2)), max_unscored_share=0))
    assert raised.value is FAILED[0]


@pytest.mark.parametrize(
    "error", [WorkerDied("engine 0", why="signal 9", fix="resume"), KeyError("a fault of ours")]
)
def test_what_belongs_to_the_run_is_no_failure_of_a_reward(error: Exception) -> None:
    engine = ScriptedEngine()
    engine.fail_on = lambda request: error if request.prompt_ids == [2] else None
    recipe = make_recipe(max_unscored_share=0.4)
    collector = Collector(make_source(), make_episodes(engine), recipe=recipe)
    with pytest.raises(type(error)):
        _take(collector)


def test_the_user_is_told_how_many_and_why() -> None:
    told: list[str] = []
    unscored = UnscoredCounter(share=0.5, total=10, what="step 7", tell=told.append)
    unscored.exclude(FAILED[0], num=2)
    assert told == ["excluding 2 samples of step 7: the judge is away; HTTP 503"]


def test_as_many_as_the_share_are_excluded() -> None:
    unscored = UnscoredCounter(share=0.29, total=100, what="step 7")
    unscored.exclude(FAILED[0], num=29)  # 0.29 * 100 is a little less in binary
    with pytest.raises(RewardError, match="30 of 100"):
        unscored.exclude(FAILED[0])


class Elsewhere:
    """Other processes, of whose samples some could not be scored: prompt -> how many are left."""

    def __init__(self, left: dict[int, int]) -> None:
        self.left = left
        self.collector = _collector(make_scorer())

    async def group(
        self, epoch: int, prompt: Prompt, position: int, progress: Progress
    ) -> Group | None:
        group = await self.collector.group(epoch, prompt, position, progress)
        assert group is not None
        left = self.left.get(prompt.index, 3)
        return replace(group, samples=group.samples[:left]) if left > 1 else None


@pytest.mark.parametrize(("left", "sizes"), [({1: 2}, [3, 2, 3, 3]), ({1: 0}, [3, 3, 3])])
def test_what_other_processes_could_not_score_is_counted(
    left: dict[int, int], sizes: list[int]
) -> None:
    collector = _collector(make_scorer(), elsewhere=Elsewhere(left))
    groups = _take(collector)
    assert [len(group.samples) for group in groups] == sizes
    assert collector.stats.figures == {"unscored_samples": 12.0 - sum(sizes)}


def test_too_many_samples_that_other_processes_could_not_score_end_the_run() -> None:
    collector = _collector(make_scorer(), elsewhere=Elsewhere({0: 2, 1: 0}))
    with pytest.raises(RewardError, match="too many samples could not be scored") as raised:
        _take(collector)
    assert "4 of 12 samples of step 1" in raised.value.why
