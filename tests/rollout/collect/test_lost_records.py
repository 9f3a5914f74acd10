"""Tests of steps that a resumed run takes from its journal, of which a record cannot be read any
more: its group is sampled again, and decided on as any other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from milescli.core.types import Group, Prompt, WeightVersion
from milescli.rollout.collect.prefetching import open_collector
from tests.rollout.collect.test_unscored import Kept
from tests.rollout.engines import (
    ScriptedEngine,
    make_episodes,
    make_recipe,
    make_scorer,
    make_source,
)


class Damaged(Kept):
    """A journal that cannot read the group of one position, and then trusts no record."""

    def __init__(self, kept: Kept, *, lost: int) -> None:
        super().__init__()
        self.groups, self.batches, self.lost = dict(kept.groups), dict(kept.batches), lost

    async def group(self, step: int, position: int, prompt: Prompt) -> Group | None:
        if position in self.groups and position == self.lost:
            self.groups.clear()
            self.batches.clear()
            self.lost = -1
        return await super().group(step, position, prompt)


WAYS = {
    "step by step": {},
    "ahead": {"max_staleness": 1},
    "what is done first": {"max_staleness": 1, "order": "done"},
}


def _trained(journal: Kept, *, flat: int | None = None, **rollout: Any) -> list[list[int]]:
    """Return the prompts of two steps; all samples of the prompt `flat` have the same reward."""
    num_scored = 0

    async def reward(*, prompt: str, response: str, label: str | None) -> float:
        nonlocal num_scored
        num_scored += 1
        return 1.0 if int(prompt) == flat else float(num_scored)

    async def run() -> list[list[int]]:
        engine, source, steps = ScriptedEngine(), make_source(40), list[list[int]]()
        episodes = make_episodes(engine, scorer=make_scorer(reward))
        collector = open_collector(source, episodes, recipe=make_recipe(**rollout), journal=journal)
        collector.start(version=engine.version, first_step=1, last_step=2)
        for step in (1, 2):
            groups = await collector.take(step, version=engine.version)
            steps.append([group.prompt.index for group in groups])
            engine.version = WeightVersion(step)
            collector.on_published(engine.version)
        assert collector.position == source.position
        await collector.stop()
        return steps

    return asyncio.run(run())


@pytest.mark.parametrize("way", WAYS)
def test_a_group_that_is_sampled_again_is_filtered_and_its_step_recorded(way: str) -> None:
    rollout = {"filter": "zero_variance", **WAYS[way]}
    before = Kept()
    assert _trained(before, **rollout) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    journal = Damaged(before, lost=2)
    assert _trained(journal, flat=2, **rollout) == [[0, 1, 3, 4], [5, 6, 7, 8]]
    assert {step: batch.kept for step, batch in journal.batches.items()} == {
        1: [0, 1, 3, 4],
        2: [5, 6, 7, 8],
    }
    assert journal.batches[1].refused == [2]


@pytest.mark.parametrize("way", WAYS)
def test_a_step_without_a_filter_goes_on_with_the_prompts_that_it_had(way: str) -> None:
    before = Kept()
    steps = _trained(before, **WAYS[way])
    assert _trained(Damaged(before, lost=2), **WAYS[way]) == steps
    assert _trained(Damaged(before, lost=6), **WAYS[way]) == steps
