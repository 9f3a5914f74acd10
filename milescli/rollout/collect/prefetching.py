"""Collects batches of later steps while the trainer works, at most `max_staleness` weight versions
ahead, in the order of the prompts. `completion_order` is the variant that ignores that order;
`Collector` samples the groups.

Batch k (counted from `start`) is trained on at version start + k. It may begin once the engines
hold version start + k - max_staleness: then no token of it can be older than the bound allows. At
most max_staleness + 1 batches exist at once, which is the bound of the queue between collecting and
training; 0 is the strict loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace

from milescli.core.events import FlowStats, RolloutStats
from milescli.core.types import Group, RewardDetail, WeightVersion
from milescli.recipe.schema import Recipe
from milescli.rollout.base import PromptSource
from milescli.rollout.collect.collector import Batch, Collector, GroupSampler, SeedOf
from milescli.rollout.collect.completion_order import CompletionOrderCollector
from milescli.rollout.collect.journal import Journal
from milescli.rollout.collect.selectors import PromptResult
from milescli.rollout.episode.episode import Episodes


@dataclass(slots=True)
class _PendingBatch:
    """Holds a batch in progress."""

    step: int
    task: asyncio.Task[Batch] | None = None
    start_position: int | None = None
    """Position of the source at the start; None until it has started."""


class PrefetchingCollector:
    """Collects like `Collector`, and generates further batches while the trainer works. Belongs to
    one event loop."""

    def __init__(
        self, collector: Collector, source: PromptSource, *, max_staleness: int, overlap: bool
    ) -> None:
        """Set the bound on staleness. `overlap`: a batch may begin before the previous one has
        ended, so that stragglers do not leave engines idle. Allow it only if each batch takes a
        fixed number of prompts, or its position in the source could not be resumed."""
        self._collector = collector
        self._source = source
        self._max_staleness = max_staleness
        self._overlap = overlap
        self._pending: deque[_PendingBatch] = deque()
        self._lag = 0
        self._next_step = self._last_step = 0
        self._version = WeightVersion(0)
        self._stopped = False
        self._flow = FlowStats()

    @property
    def stats(self) -> RolloutStats:
        """Return the statistics of the last step that `take` returned."""
        return self._collector.stats

    @property
    def refused(self) -> list[Group]:
        """Return the groups that the filter rejected in the last step taken."""
        return self._collector.refused

    @property
    def flow(self) -> FlowStats:
        """Return the flow up to the last step taken."""
        return self._flow

    @property
    def history(self) -> dict[int, PromptResult]:
        """Return an empty mapping: a curriculum cannot be used here, as it needs the previous
        step's results."""
        return self._collector.history

    @property
    def position(self) -> int:
        """Return the position of the oldest prompt that no step has taken, from which a resumed run
        continues."""
        begun = [batch.start_position for batch in self._pending]
        return min([self._source.position, *(start for start in begun if start is not None)])

    @property
    def taken(self) -> list[int]:
        """Return an empty list: steps take the prompts in their order."""
        return []

    def start(self, *, version: WeightVersion, first_step: int, last_step: int) -> None:
        """Begin to collect for `first_step`, which trains at `version`, up to `last_step`; the
        version rises by one per step. Call it inside the event loop, when the engines hold
        `version`."""
        assert not self._pending, "started twice"
        self._collector.start(version=version, first_step=first_step, last_step=last_step)
        self._lag = first_step - version
        self._next_step, self._last_step, self._version = first_step, last_step, version
        self._fill()

    def on_published(self, version: WeightVersion) -> None:
        """Record that the engines hold `version`, so that further batches may begin."""
        assert version >= self._version, f"version {version} after {self._version}"
        self._version = version
        self._fill()

    async def take(self, step: int, *, version: WeightVersion) -> list[Group]:
        """Return the groups of a step like `Collector.take`; wait only for groups that are not
        complete. Raises what collecting the batch raised."""
        assert step - version == self._lag, (
            f"step {step} at version {version}: {self._lag} steps ahead were agreed on"
        )
        assert version == self._version, (
            f"version {version} was not published; the last was {self._version}"
        )
        assert self._pending and self._pending[0].step == step, (
            f"step {step} was taken before, or after `stop`"
        )
        task = self._pending[0].task
        assert task is not None
        groups = await self._collector.finish_batch(await task, version=version)
        # nothing is awaited from here on: a step that is cancelled before has taken nothing
        self._pending.popleft()
        waiting = sum(
            len(pending.task.result().kept)
            for pending in self._pending
            if pending.task is not None and pending.task.done() and not pending.task.exception()
        )
        self._flow = replace(self._collector.flow, waiting_groups=waiting)
        return groups

    async def stop(self) -> None:
        """Cancel the batches in progress and wait until they have ended. The journal has the groups
        that are complete; a resumed run generates the others again."""
        self._stopped = True
        tasks = [batch.task for batch in self._pending if batch.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._source.seek(self.position)
        self._pending.clear()

    def _fill(self) -> None:
        while not self._stopped and self._next_step <= min(
            self._last_step, self._version + self._lag + self._max_staleness
        ):
            before = self._pending[-1].task if self._pending else None
            pending = _PendingBatch(step=self._next_step)
            pending.task = asyncio.create_task(
                self._run(pending, after=before), name=f"collect-step-{pending.step}"
            )
            self._pending.append(pending)
            self._next_step += 1

    async def _run(self, pending: _PendingBatch, *, after: asyncio.Task[Batch] | None) -> Batch:
        if after is not None and not self._overlap:
            await asyncio.wait([after])
            after.result()  # where it failed, this one has nothing to add
        pending.start_position = self._source.position
        return await self._collector.collect(pending.step)


def open_collector(
    source: PromptSource,
    episodes: Episodes,
    *,
    recipe: Recipe,
    seed_of: SeedOf | None = None,
    with_greedy: bool = False,
    compared: Collection[RewardDetail] = (),
    journal: Journal | None = None,
    taken: Collection[int] = (),
    group_sampler: GroupSampler | None = None,
) -> Collector | PrefetchingCollector | CompletionOrderCollector:
    """Return the collector that the recipe's `rollout.max_staleness` and `order` ask for. `taken`:
    positions at or after the source's that steps have taken; the others: see `Collector`."""
    collector = Collector(
        source,
        episodes,
        recipe=recipe,
        seed_of=seed_of,
        with_greedy=with_greedy,
        compared=compared,
        journal=journal,
        group_sampler=group_sampler,
    )
    if recipe.rollout.max_staleness == 0:
        return collector
    if recipe.rollout.order == "done":
        return CompletionOrderCollector(
            collector, source, recipe=recipe, journal=journal, taken=taken
        )
    overlap = recipe.rollout.filter == "none"
    return PrefetchingCollector(
        collector, source, max_staleness=recipe.rollout.max_staleness, overlap=overlap
    )
