"""Collects the scored and filtered groups of one step at a time (Collector). The modules
`prefetching` and `completion_order` collect for later steps while the trainer works.

The order of the groups is the order of the prompts and every sampling seed is fixed by (run seed,
position, sample), so what is trained on does not depend on which sample was done first."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from milescli.core.concurrency import all_or_first_error, in_thread
from milescli.core.errors import MilesError, RewardError, WaitTimeout
from milescli.core.events import FlowStats, RolloutStats
from milescli.core.plug_points import CURRICULA, FILTERS, SAMPLE_FILTERS, SELECTIONS, SHAPINGS
from milescli.core.types import Group, Prompt, RewardDetail, Sample, WeightVersion
from milescli.core.units import decimal_product
from milescli.recipe.schema import Recipe, Rollout
from milescli.rollout.base import PromptSource
from milescli.rollout.collect.journal import BatchRecord, Journal, NoJournal
from milescli.rollout.collect.rollout_stats import staleness_of, summarise
from milescli.rollout.collect.selectors import (
    FIRST,
    NONE,
    PromptResult,
    choose_prompts,
    is_kept,
    mark_learned_samples,
    record_rewards,
    select_groups,
    shape_rewards,
)
from milescli.rollout.episode.episode import Episodes
from milescli.rollout.episode.unscored import INFRASTRUCTURE_ERRORS, UnscoredCounter
from milescli.workers.isolated import resolve_isolated

SeedOf = Callable[[int, int, int], int]
"""(run seed, position of the prompt, sample index) -> sampling seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Holds one step's groups, before the trainer's version is known."""

    kept: list[Group]
    """In the order of their prompts."""
    refused: list[Group]
    """Groups that the filter rejected."""
    start_position: int
    """Position of the source before the batch took its first prompt."""
    num_lost: int = 0
    """Number of groups that were dropped because too few samples could be scored."""


@dataclass(slots=True)
class Progress:
    """Counts the samples in progress, for the error of a wait that reached its bound."""

    step: int
    num_samples: int = 0
    num_done: int = 0
    num_tokens: int = 0
    """Number of tokens of the finished samples."""
    last_done: float = field(default_factory=time.monotonic)


class GroupSampler(Protocol):
    """Samples and scores groups in other processes."""

    async def group(
        self, epoch: int, prompt: Prompt, position: int, progress: Progress
    ) -> Group | None:
        """Return the prompt's group, whose trajectories are `TrajectoryStub`s; None if too few of
        its samples could be scored. Raises as `Collector.take`."""
        ...


TOO_MANY_UNSCORED = RewardError(
    "too many samples could not be scored",
    why="the warnings above say what failed",
    fix="fix the reward, judge, sandbox or environment, then resume the run",
)
"""Raised if other processes collect, each of which has warned, or if a step has no groups left."""


class Collector:
    """Collects groups step by step, each step only when `take` is called. Belongs to one event
    loop; one `take` at a time."""

    def __init__(
        self,
        source: PromptSource,
        episodes: Episodes,
        *,
        recipe: Recipe,
        seed_of: SeedOf | None = None,
        with_greedy: bool = False,
        compared: Collection[RewardDetail] = (),
        journal: Journal | None = None,
        group_sampler: GroupSampler | None = None,
    ) -> None:
        """Set up collection. `with_greedy`: each group also gets the reward of a greedy response.
        `compared`: what the objective compares of rewards besides their sum. `journal`: records the
        sampled groups; recorded groups are not sampled again. `group_sampler`: other processes
        sample, score and hold the groups; None: this process does."""
        self._source = source
        self._episodes = episodes
        self._recipe = recipe
        self._seed_of = seed_of or sampling_seed
        self._keep = resolve_isolated(FILTERS, recipe.rollout.filter)
        self._sample_filter = resolve_isolated(SAMPLE_FILTERS, recipe.rollout.sample_filter)
        self._shaping = resolve_isolated(SHAPINGS, recipe.rollout.shaping)
        self._selection = resolve_isolated(SELECTIONS, recipe.rollout.selection)
        self._curriculum = resolve_isolated(CURRICULA, recipe.data.curriculum)
        self._with_greedy, self._compared = with_greedy, compared
        self._group_sampler = group_sampler
        self._journal = journal or NoJournal()
        self.refused: list[Group] = []
        """By the filter, in the last step taken."""
        self.history: dict[int, PromptResult] = {}
        """What came of prompts, by index; kept where there is a curriculum."""
        self.flow = FlowStats()
        """Up to the last step taken."""
        self._meter = FlowMeter()
        self._unscored: dict[int, UnscoredCounter] = {}
        """By step; that of the last few."""
        self._stats: RolloutStats | None = None

    @property
    def stats(self) -> RolloutStats:
        """Return the statistics of the last step that `take` returned."""
        assert self._stats is not None, "nothing was taken yet"
        return self._stats

    @property
    def position(self) -> int:
        """Return the position of the source, from which a resumed run continues."""
        return self._source.position

    @property
    def taken(self) -> list[int]:
        """Return an empty list: steps take the prompts in their order."""
        return []

    def start(self, *, version: WeightVersion, first_step: int, last_step: int) -> None:
        """Reset the flow statistics. Nothing else starts before `take` (see
        `PrefetchingCollector.start`)."""
        self._meter.read()

    def on_published(self, version: WeightVersion) -> None:
        """Do nothing: no batch waits for a version (see `PrefetchingCollector.on_published`)."""

    async def stop(self) -> None:
        """Do nothing: no task runs between steps (see `PrefetchingCollector.stop`)."""

    async def take(self, step: int, *, version: WeightVersion) -> list[Group]:
        """Return the groups of `step` (`rollout.prompts_per_step` of them, in the order of their
        prompts); `version` is the version of the trainer and of the engines. Raises the first error
        of any sample (RewardError, WorkerDied, ...), with all others cancelled; WaitTimeout after
        `machine.step_timeout_s`; MilesError if the filter refuses more than
        `rollout.max_filter_rounds` rounds."""
        start = self._source.position
        try:
            return await self.finish_batch(await self.collect(step), version=version)
        except BaseException:
            # a run that is stopped in the middle saves where this step began
            self._source.seek(start)
            raise

    async def finish_batch(self, batch: Batch, *, version: WeightVersion) -> list[Group]:
        """Return the batch's groups with shaped rewards, check their staleness against the recipe's
        bound, and set `stats`."""
        bound = self._recipe.rollout.max_staleness
        for group in batch.kept:
            age = staleness_of(group, version)
            assert 0 <= age <= bound, (
                f"prompt {group.prompt.index}: staleness {age} at version {version}, bound {bound}"
            )
        stats = summarise(
            kept=batch.kept, refused=batch.refused, version=version, compared=self._compared
        )
        figures = {**stats.figures, **self._unscored_metric(batch)}
        skipped = getattr(self._source, "num_skipped", 0)
        self._stats = replace(stats, skipped_prompts=skipped, figures=figures)
        self.flow = self._meter.read()
        self.refused, settings = batch.refused, self._recipe.rollout

        def finished() -> list[Group]:
            kept = [
                mark_learned_samples(self._sample_filter, group, settings=settings)
                for group in batch.kept
            ]
            return [shape_rewards(self._shaping, group, settings=settings) for group in kept]

        groups = await in_thread(finished)
        if self._recipe.data.curriculum != NONE:
            record_rewards(self.history, [*batch.kept, *batch.refused])
        return groups

    def _unscored_metric(self, batch: Batch) -> dict[str, float]:
        """Return the metric `unscored_samples`, the number of samples that the batch's groups lack;
        empty if they lack none."""
        groups = [*batch.kept, *batch.refused]
        wanted = (len(groups) + batch.num_lost) * self._recipe.rollout.samples_per_prompt
        missing = wanted - sum(len(group.samples) for group in groups)
        return {"unscored_samples": float(missing)} if missing else {}

    async def collect(self, step: int) -> Batch:
        """Take prompts, sample and score their groups, and replace those that the filter
        refuses."""
        progress, bound_s = Progress(step=step), self._recipe.machine.step_timeout_s
        try:
            async with asyncio.timeout(bound_s) as bound:
                recorded = await self._collect_recorded(progress)
                return recorded or await self._collect(progress)
        except TimeoutError:
            if not bound.expired():
                raise
            raise missing_groups_error([progress], step=step, bound_s=bound_s) from None

    async def _collect_recorded(self, progress: Progress) -> Batch | None:
        """Return the batch as an earlier run collected it, if the journal has all groups of the
        step; None if it has not, or if one of them cannot be read any more and the filter may
        refuse the group that is sampled in its place."""
        start = self._source.position
        if (record := self._journal.batch(progress.step, start=start)) is None:
            return None
        drawn = {
            position: (epoch, prompt)
            for count in record.draws
            for position, epoch, prompt in self._next(count)
        }
        groups = await all_or_first_error(
            [self.group(*drawn[position], position, progress) for position in record.positions]
        )
        is_lost = self._journal.batch(progress.step, start=start) is None
        if is_lost and self._recipe.rollout.filter != NONE:
            # without a filter, later steps may have drawn the prompts that follow (`overlap`)
            self._source.seek(start)
            return None
        number = len(record.kept)
        return Batch(
            kept=[group for group in groups[:number] if group is not None],
            refused=[group for group in groups[number:] if group is not None],
            start_position=start,
            num_lost=len(record.dropped) + groups.count(None),
        )

    async def _collect(self, progress: Progress) -> Batch:
        rollout, step = self._recipe.rollout, progress.step
        start, kept, refused = self._source.position, list[Group](), list[Group]()
        places, draws, lost, end = dict[tuple[int, int], int](), list[int](), list[int](), start
        target = rollout.prompts_per_step
        rounds, left = 0, rollout.max_filter_rounds * target
        while left > 0 and len(kept) < target:
            wanted = target - len(kept)
            count = math.ceil(decimal_product(wanted, rollout.over_sampling))
            prompts = await self._draw(count, draws)
            end = self._source.position
            rounds, left = rounds + 1, left - len(prompts)
            places |= {(epoch, prompt.index): at for at, epoch, prompt in prompts}
            groups = [
                self.group(epoch, prompt, position, progress) for position, epoch, prompt in prompts
            ]
            if rollout.over_sampling > 1.0 and rollout.selection == FIRST:
                places_lost = await self._take_first(groups, wanted, kept, refused)
            else:
                found, sampled = list[Group](), await all_or_first_error(groups)
                places_lost = [place for place, group in enumerate(sampled) if group is None]
                for group in sampled:
                    if group is not None:
                        (found if await self.is_kept(group) else refused).append(group)
                kept += await self._select(found, wanted)
            lost += [prompts[place][0] for place in places_lost]
            if rollout.filter == NONE and kept:  # a step takes a fixed number of prompts
                target = len(kept)
        if len(kept) == target:
            record = BatchRecord(
                step=step,
                start=start,
                end=end,
                draws=draws,
                kept=[places[group.epoch, group.prompt.index] for group in kept],
                refused=[places[group.epoch, group.prompt.index] for group in refused],
                dropped=lost,
            )
            self._journal.record_batch(record)
            return Batch(kept=kept, refused=refused, start_position=start, num_lost=len(lost))
        if not (kept or refused):
            raise TOO_MANY_UNSCORED
        raise too_few_groups_error(rollout, kept, refused, step=step, rounds=rounds)

    async def is_kept(self, group: Group) -> bool:
        """Return True if the recipe's filter keeps the group."""
        settings = self._recipe.rollout
        check = partial(is_kept, self._keep, group, settings=settings, compared=self._compared)
        return check() if settings.filter in FILTERS.builtin else await in_thread(check)

    def _next(self, count: int) -> list[tuple[int, int, Prompt]]:
        """Return the next prompts of the source, each with its position and its epoch."""
        first = self._source.position
        taken = self._source.take(count)
        return [(first + n, epoch, prompt) for n, (epoch, prompt) in enumerate(taken)]

    async def _draw(self, count: int, draws: list[int]) -> list[tuple[int, int, Prompt]]:
        """Return the next prompts to sample; append to `draws` how many the source gave."""
        data = self._recipe.data
        if data.curriculum == NONE:
            draws.append(count)
            return self._next(count)
        draws.append(math.ceil(decimal_product(count, data.curriculum_pool)))
        taken = self._next(draws[-1])
        drawn, indices = list[tuple[int, int, Prompt]](), set[int]()
        for place, (at, epoch, prompt) in enumerate(taken):
            # a pool that reaches into the next epoch has a prompt twice
            if prompt.index not in indices or len(taken) - place <= count - len(drawn):
                drawn.append((at, epoch, prompt))
                indices.add(prompt.index)
        candidates = [prompt for _, _, prompt in drawn]
        places = await in_thread(
            lambda: choose_prompts(
                self._curriculum, candidates, self.history, count=count, settings=data
            )
        )
        return [drawn[place] for place in places]

    async def _select(self, groups: list[Group], wanted: int) -> list[Group]:
        settings = self._recipe.rollout
        return await in_thread(
            lambda: select_groups(self._selection, groups, count=wanted, settings=settings)
        )

    async def _take_first(
        self,
        groups: Iterable[Coroutine[Any, Any, Group | None]],
        wanted: int,
        kept: list[Group],
        refused: list[Group],
    ) -> list[int]:
        """Collect the first `wanted` groups that the filter keeps, in the order of their prompts,
        and cancel the unfinished ones. Return the places of those that could not be scored. Raises
        the first error of any group."""
        tasks = [asyncio.ensure_future(group) for group in groups]
        waiting, found, lost = set(tasks), dict[int, Group](), list[int]()
        try:
            while waiting and len(found) < wanted:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for place in sorted(tasks.index(task) for task in done):
                    group = tasks[place].result()
                    if group is None:
                        lost.append(place)
                    elif not await self.is_kept(group):
                        refused.append(group)
                    elif len(found) < wanted:
                        found[place] = group
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        kept += [found[place] for place in sorted(found)]
        return lost

    async def group(
        self, epoch: int, prompt: Prompt, position: int, progress: Progress
    ) -> Group | None:
        """Return the prompt's sampled and scored group, from the journal if `step` may use its
        record. The group lacks samples that could not be scored; None if fewer than two are left.
        Raises as `take`."""
        if self._group_sampler is not None:
            with self._meter.sample(count := self._recipe.rollout.samples_per_prompt):
                progress.num_samples += count
                group = await self._group_sampler.group(epoch, prompt, position, progress)
            if missing := count - (0 if group is None else len(group.samples)):
                self._unscored_of(progress.step).exclude(TOO_MANY_UNSCORED, num=missing)
            return group
        recorded = await self._journal.group(progress.step, position, prompt)
        if recorded is not None:
            return recorded
        count = self._recipe.rollout.samples_per_prompt
        played = await all_or_first_error(
            [
                self._sample(prompt, position, index, progress, greedy=index == count)
                for index in range(count + self._with_greedy)
            ]
        )
        greedy = played.pop() if self._with_greedy else None
        samples = [sample for sample in played if sample is not None]
        if len(samples) < min(2, count) or (self._with_greedy and greedy is None):
            return None
        try:
            samples = await self._episodes.score_samples(prompt, samples)
            if greedy is not None:  # by itself: it is none of those that are compared
                (greedy,) = await self._episodes.score_samples(prompt, [greedy])
        except INFRASTRUCTURE_ERRORS as error:
            self._unscored_of(progress.step).exclude(error, num=len(samples))
            return None
        greedy_reward = None if greedy is None else greedy.reward
        group = Group(prompt=prompt, samples=samples, epoch=epoch, greedy_reward=greedy_reward)
        self._journal.record_group(position, group)
        return group

    def _unscored_of(self, step: int) -> UnscoredCounter:
        """Return the counter of the step, and forget all but the last few steps."""
        rollout = self._recipe.rollout
        if step not in self._unscored:
            self._unscored[step] = UnscoredCounter(
                share=rollout.max_unscored_share,
                total=rollout.prompts_per_step * rollout.samples_per_prompt,
                what=f"step {step}",
                tell=None if self._group_sampler is not None else self._episodes.tell,
            )
            for old in sorted(self._unscored)[: -rollout.max_staleness - 2]:
                del self._unscored[old]
        return self._unscored[step]

    async def _sample(
        self, prompt: Prompt, position: int, index: int, progress: Progress, *, greedy: bool
    ) -> Sample | None:
        """Play and score one sample; None if its reward or its environment failed."""
        progress.num_samples += 1
        seed = self._seed_of(self._recipe.run.seed, position, index)
        sample = None
        try:
            with self._meter.sample():
                sample = await self._episodes.play(
                    prompt, sample_index=index, seed=seed, greedy=greedy
                )
            progress.num_tokens += sample.num_loss_tokens
        except INFRASTRUCTURE_ERRORS as error:
            self._unscored_of(progress.step).exclude(error)
        progress.num_done += 1
        progress.last_done = time.monotonic()
        return sample


def sampling_seed(run_seed: int, position: int, sample_index: int) -> int:
    """Return a seed of 31 bits, equal on every machine; `position` counts prompts over all epochs,
    so a repeated prompt gets another seed."""
    digest = hashlib.blake2b(
        f"{run_seed}/{position}/{sample_index}".encode(), digest_size=4
    ).digest()
    return int.from_bytes(digest, "little") >> 1


def missing_groups_error(progress: Iterable[Progress], *, step: int, bound_s: float) -> WaitTimeout:
    """Return the error for missing groups of `step` after `bound_s`."""
    begun = list(progress)
    silent_s = time.monotonic() - max(one.last_done for one in begun)
    num_done = sum(one.num_done for one in begun)
    return WaitTimeout(
        f"timed out waiting for the samples of step {step}",
        why=f"{num_done} of {sum(one.num_samples for one in begun)} samples were complete after "
        f"{bound_s:g} s; the last one arrived {silent_s:.0f} s ago",
        fix=[
            f"--set machine.step_timeout_s={2 * bound_s:g}",
            "--set rollout.max_response_tokens=N   # shorter responses",
        ],
    )


def too_few_groups_error(
    rollout: Rollout, kept: Sequence[Group], refused: Sequence[Group], *, step: int, rounds: int
) -> MilesError:
    """Return the error for a filter that refuses more than `rollout.max_filter_rounds` allows."""
    return MilesError(
        f"the filter `{rollout.filter}` left too few groups for step {step}",
        why=f"{len(kept)} of {rollout.prompts_per_step} after {rounds} rounds, {len(refused)} "
        f"rejected; the mean reward is {_mean_reward([*kept, *refused]):.3f}: the prompts "
        "are too easy or too hard for the model",
        fix=[
            "--set rollout.filter=none",
            f"--set rollout.max_filter_rounds={4 * rollout.max_filter_rounds}",
        ],
    )


def _mean_reward(groups: list[Group]) -> float:
    rewards = [reward for group in groups for reward in group.rewards]
    return sum(rewards) / len(rewards)


class FlowMeter:
    """Measures how many samples are being generated over time, and so whether rollout was idle.
    Belongs to one event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Measure with `clock`, in seconds."""
        self._clock = clock
        self._num_running = 0
        self._began = self._last = clock()
        self._idle_s = self._sample_s = 0.0

    @contextmanager
    def sample(self, count: int = 1) -> Iterator[None]:
        """Count `count` running samples while the context is open."""
        self._advance()
        self._num_running += count
        try:
            yield
        finally:
            self._advance()
            self._num_running -= count

    def read(self) -> FlowStats:
        """Return the statistics since the last call."""
        self._advance()
        seconds = self._last - self._began
        stats = FlowStats(
            idle_s=self._idle_s, running_mean=self._sample_s / seconds if seconds > 0 else 0.0
        )
        self._began, self._idle_s, self._sample_s = self._last, 0.0, 0.0
        return stats

    def _advance(self) -> None:
        now = self._clock()
        self._sample_s += self._num_running * (now - self._last)
        if not self._num_running:
            self._idle_s += now - self._last
        self._last = now
