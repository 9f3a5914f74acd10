"""Collects for later steps while the trainer works, and lets each step train on the groups that
finish first: no step waits for a slow group while others are complete. `Collector` samples the
groups.

At weight version v at most (v - v0 + max_staleness + 1) steps' worth of groups have begun since
version v0, without refused and abandoned ones (the bound of AReaL, arXiv 2505.24298, equation 3).
Rollout waits for the trainer at this bound, and the trainer waits for a step's worth of groups. A
group is as old as its oldest token. If a group is too old for every later step, it is abandoned,
complete or not, and its prompt is sampled again or dropped; with `rollout.stale_groups: wait` the
last step that can use it waits for it.

Steps take prompts out of order. A checkpoint therefore records the position of the oldest prompt
that no step has settled, and the settled positions after it (`taken`). A resumed run first takes
the steps whose groups are all in its journal, and starts no other groups until then. Other groups
of the journal were done before any new one: a step waits until they are read, and prefers them to
new groups of equal age, which would otherwise make them too old and have them sampled again."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from milescli.core.concurrency import all_or_first_error
from milescli.core.events import FlowStats, RolloutStats
from milescli.core.types import Group, Prompt, WeightVersion
from milescli.recipe.schema import Recipe
from milescli.rollout.base import PromptSource
from milescli.rollout.collect.collector import (
    Batch,
    Collector,
    Progress,
    missing_groups_error,
    too_few_groups_error,
)
from milescli.rollout.collect.journal import BatchRecord, Journal, NoJournal
from milescli.rollout.collect.selectors import PromptResult

MAX_RETRIES = 3
"""Number of retries of one prompt whose groups become too old: one that takes longer than
max_staleness + 1 steps would be restarted for ever."""


@dataclass(slots=True, eq=False)
class _Slot:
    """Holds one prompt in flight."""

    position: int
    """Position of the prompt in the source."""
    epoch: int
    prompt: Prompt
    num_retries: int = 0
    is_recorded: bool = False
    """The journal has the group."""
    began: int = 0
    """Lower bound of the weight version that the engines held when the group began."""
    progress: Progress = field(default_factory=lambda: Progress(step=0))
    task: asyncio.Task[None] | None = None
    group: Group | None = None
    """The group, once it is scored and kept by the filter."""

    @property
    def is_being_read(self) -> bool:
        """Return True while the group is read from the journal. If that fails, it is sampled."""
        return self.is_recorded and self.group is None and self.progress.num_samples == 0

    @property
    def oldest(self) -> int:
        """Return the version of the group's oldest token, or a lower bound while it is
        generated."""
        if self.group is None:
            return self.began
        return min(sample.oldest_version for sample in self.group.samples)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the finished samples."""
        if self.group is None:
            return self.progress.num_tokens
        return sum(sample.num_loss_tokens for sample in self.group.samples)


class CompletionOrderCollector:
    """Collects like `PrefetchingCollector`, but a step takes the groups that finish first. Belongs
    to one event loop; one `take` at a time."""

    def __init__(
        self,
        collector: Collector,
        source: PromptSource,
        *,
        recipe: Recipe,
        journal: Journal | None = None,
        taken: Collection[int] = (),
    ) -> None:
        """Skip the positions in `taken`, at or after the source's, which steps have settled."""
        self._collector, self._source = collector, source
        self._recipe, self._rollout = recipe, recipe.rollout
        self._journal = journal or NoJournal()
        self._settled = set(taken)
        self._slots: dict[int, _Slot] = {}
        """By position: in the making, or scored and waiting."""
        self._backlog: deque[_Slot] = deque()
        """Drawn from the source, and not begun."""
        self._refused: dict[int, Group] = {}
        """By the filter, since the last step."""
        self._dropped: list[int] = []
        """Positions that were left out, since the last step."""
        self._done: list[_Slot] = []
        """Those of `_slots` that are scored, the first that was done first."""
        self._recorded_steps: dict[int, BatchRecord] = {}
        """By step: what the journal has whole."""
        self._cancelled_tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._next_step = self._last_step = 0
        self._version = WeightVersion(0)
        self._lag = 0
        self._num_stale = self._num_wasted = self._num_lost = 0
        self._flow = FlowStats()
        self._stopped = False

    @property
    def stats(self) -> RolloutStats:
        """Return the statistics of the last step that `take` returned."""
        return self._collector.stats

    @property
    def flow(self) -> FlowStats:
        """Return the flow up to the last step taken."""
        return self._flow

    @property
    def refused(self) -> list[Group]:
        """Return the groups that the filter rejected between the last two steps taken."""
        return self._collector.refused

    @property
    def history(self) -> dict[int, PromptResult]:
        """Return an empty mapping: a curriculum cannot be used here, as it needs the previous
        step's results."""
        return self._collector.history

    @property
    def position(self) -> int:
        """Return the position of the oldest prompt that no step has settled, from which a resumed
        run continues."""
        drawn = [slot.position for slot in self._backlog]
        return min([self._source.position, *self._slots, *self._refused, *self._dropped, *drawn])

    @property
    def taken(self) -> list[int]:
        """Return the positions after `position` that steps have trained on, refused or dropped."""
        position = self.position
        return sorted(place for place in self._settled if place > position)

    @property
    def _max_in_flight(self) -> int:
        """Return how many groups may be in flight: as many as the trainer can still take within the
        bound of staleness and the remaining steps."""
        ahead = self._version + self._lag - self._next_step + 1 + self._rollout.max_staleness
        left = self._last_step - self._next_step + 1
        return self._rollout.prompts_per_step * min(ahead, left)

    @property
    def _max_refused(self) -> int:
        """Return how many groups the filter may refuse for one step."""
        return self._rollout.max_filter_rounds * self._rollout.prompts_per_step

    def start(self, *, version: WeightVersion, first_step: int, last_step: int) -> None:
        """Begin to collect for `first_step`, which trains at `version`, up to `last_step`; the
        version rises by one per step. Call it inside the event loop, when the engines hold
        `version`."""
        assert not self._slots, "started twice"
        self._collector.start(version=version, first_step=first_step, last_step=last_step)
        self._lag = first_step - version
        self._next_step, self._last_step, self._version = first_step, last_step, version
        step, start = first_step, self._source.position
        while step <= last_step and (record := self._journal.batch(step, start=start)) is not None:
            if not self._settled.isdisjoint([*record.positions, *record.dropped]):
                break
            self._recorded_steps[step] = record
            step, start = step + 1, record.end
        self._skip_settled()
        self._fill()

    def on_published(self, version: WeightVersion) -> None:
        """Record that the engines hold `version`: abandon groups that are too old for it, and start
        others."""
        assert version >= self._version, f"version {version} after {self._version}"
        self._version = version
        for slot in list(self._slots.values()):
            if self._is_too_old(slot):
                self._give_up(slot)
        self._fill()

    async def take(self, step: int, *, version: WeightVersion) -> list[Group]:
        """Return a step's groups in the order of their prompts: the oldest finished groups, and of
        equally old ones those that finished first. Wait until there are enough. Raises the first
        error of any sample, WaitTimeout after `machine.step_timeout_s`, and MilesError if the
        filter refuses more than `rollout.max_filter_rounds` rounds."""
        assert step == self._next_step and step - version == self._lag, (
            f"step {step} at version {version}: step {self._next_step} is next, {self._lag} ahead"
        )
        assert version == self._version, (
            f"version {version} was not published; the last was {self._version}"
        )
        record, progress, batch = self._recorded_steps.get(step), Progress(step=step), None
        bound_s = self._recipe.machine.step_timeout_s
        try:
            async with asyncio.timeout(bound_s) as bound:
                if record is not None:
                    batch = await self._collect_recorded(record, progress)
                if record is None or batch is None:
                    await self._wait_for_groups(step)
                    batch, record = self._choose_groups(step)
        except TimeoutError:
            if not bound.expired():
                raise
            begun = [progress, *(slot.progress for slot in self._slots.values())]
            raise missing_groups_error(begun, step=step, bound_s=bound_s) from None
        groups = await self._collector.finish_batch(batch, version=version)
        # nothing is awaited from here on: a step that is cancelled before has taken nothing
        self._settle(record)
        if self._recorded_steps.pop(step, None) is None:
            self._journal.record_batch(replace(record, end=self.position))
        self._next_step += 1
        self._flow = replace(
            self._collector.flow,
            waiting_groups=len(self._done),
            stale_groups=self._num_stale,
            wasted_tokens=self._num_wasted,
        )
        self._num_stale = self._num_wasted = self._num_lost = 0
        self._fill()
        return groups

    async def stop(self) -> None:
        """Cancel the groups in progress and wait until they have ended. The journal has the groups
        that are complete; a resumed run generates the others again."""
        self._stopped = True
        tasks = [slot.task for slot in self._slots.values() if slot.task is not None]
        tasks += self._cancelled_tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._source.seek(self.position)
        for container in (self._slots, self._backlog, self._done, self._refused, self._dropped):
            container.clear()

    # ------------------------------------------------------------------ rollout's side

    def _draw(self) -> _Slot:
        """Return the next prompt that no step has settled."""
        position = self._source.position
        ((epoch, prompt),) = self._source.take(1)
        self._skip_settled()
        return _Slot(position=position, epoch=epoch, prompt=prompt)

    def _skip_settled(self) -> None:
        """Move the source past settled prompts: `position` would otherwise jump when one is
        drawn."""
        while self._source.position in self._settled:
            self._source.take(1)

    def _fill(self) -> None:
        """Start as many groups as the bounds allow; none while steps come from the journal, which
        may have the next groups too."""
        while (
            not (self._stopped or self._recorded_steps)
            and len(self._slots) < self._max_in_flight
            and len(self._refused) < self._max_refused
        ):
            slot = self._backlog.popleft() if self._backlog else self._draw()
            slot.began, slot.progress = self._version, Progress(step=self._next_step)
            slot.is_recorded = self._journal.has_group(self._next_step, slot.position)
            self._slots[slot.position] = slot
            slot.task = asyncio.create_task(self._play(slot), name=f"prompt-{slot.position}")
            slot.task.add_done_callback(self._on_task_end)

    async def _play(self, slot: _Slot) -> None:
        group = await self._collector.group(slot.epoch, slot.prompt, slot.position, slot.progress)
        if group is None:
            del self._slots[slot.position]
            self._dropped.append(slot.position)
            self._num_lost += 1
        elif await self._collector.is_kept(group):
            slot.group = group
            self._done.append(slot)
            if self._is_too_old(slot):  # one that the journal had
                self._give_up(slot)
        else:
            del self._slots[slot.position]
            self._refused[slot.position] = group
        self._fill()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._cancelled_tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        self._changed.set()

    def _is_too_old(self, slot: _Slot) -> bool:
        return self._version - slot.oldest > self._rollout.max_staleness

    def _give_up(self, slot: _Slot) -> None:
        assert slot.task is not None
        if not slot.task.done():
            slot.task.cancel()
            self._cancelled_tasks.add(slot.task)
        del self._slots[slot.position]
        self._done = [other for other in self._done if other is not slot]
        self._num_stale += 1
        self._num_wasted += slot.num_tokens
        if self._rollout.stale_groups != "drop" and slot.num_retries < MAX_RETRIES:
            self._backlog.append(
                _Slot(
                    position=slot.position,
                    epoch=slot.epoch,
                    prompt=slot.prompt,
                    num_retries=slot.num_retries + 1,
                )
            )
        else:
            self._dropped.append(slot.position)

    # ------------------------------------------------------------------ the trainer's side

    async def _wait_for_groups(self, step: int) -> None:
        """Wait for a step's worth of groups. Raises what a sample raised, or MilesError."""
        wanted = self._rollout.prompts_per_step
        while True:
            if self._failure is not None:
                raise self._failure
            is_reading = any(slot.is_being_read for slot in self._slots.values())
            if len(self._done) >= wanted and not is_reading and not self._waits_for_old():
                return
            if len(self._slots) == len(self._done) and len(self._refused) >= self._max_refused:
                raise too_few_groups_error(
                    self._rollout,
                    [slot.group for slot in self._done if slot.group is not None],
                    list(self._refused.values()),
                    step=step,
                    rounds=self._rollout.max_filter_rounds,
                )
            self._changed.clear()
            await self._changed.wait()

    def _waits_for_old(self) -> bool:
        """Return True if an unfinished group can be used by this step only, and the recipe waits
        for it."""
        if self._rollout.stale_groups != "wait":
            return False
        last_chance = self._version - self._rollout.max_staleness
        old = [slot for slot in self._slots.values() if slot.oldest <= last_chance]
        num_done = sum(slot.group is not None for slot in old)
        return num_done < min(len(old), self._rollout.prompts_per_step)

    def _choose_groups(self, step: int) -> tuple[Batch, BatchRecord]:
        """Return the finished groups that the step takes: the oldest ones; of equally old ones
        those of the journal by position, then those that finished first."""
        oldest = sorted(
            self._done,
            key=lambda slot: (slot.oldest, slot.position if slot.is_recorded else math.inf),
        )
        chosen = sorted(oldest[: self._rollout.prompts_per_step], key=lambda slot: slot.position)
        record = BatchRecord(
            step=step,
            start=self.position,
            end=self.position,
            draws=[],
            kept=[slot.position for slot in chosen],
            refused=list(self._refused),
            dropped=list(self._dropped),
        )
        batch = Batch(
            kept=[slot.group for slot in chosen if slot.group is not None],
            refused=list(self._refused.values()),
            start_position=record.start,
            num_lost=self._num_lost,
        )
        return batch, record

    async def _collect_recorded(self, record: BatchRecord, progress: Progress) -> Batch | None:
        """Return the batch as an earlier run collected it. If one of its groups cannot be read any
        more, no step is taken from the journal from now on: start groups, and return None."""
        while self._source.position <= max([*record.positions, *record.dropped]):
            self._backlog.append(self._draw())
        drawn = {slot.position: slot for slot in self._backlog}
        groups = await all_or_first_error(
            [
                self._collector.group(drawn[place].epoch, drawn[place].prompt, place, progress)
                for place in record.positions
            ]
        )
        if self._journal.batch(record.step, start=record.start) is None:
            self._recorded_steps.clear()
            self._fill()
            return None
        number = len(record.kept)
        return Batch(
            kept=[group for group in groups[:number] if group is not None],
            refused=[group for group in groups[number:] if group is not None],
            start_position=record.start,
            num_lost=groups.count(None),
        )

    def _settle(self, record: BatchRecord) -> None:
        """Mark the record's prompts as settled: no later step takes them."""
        settled = {*record.positions, *record.dropped}
        self._settled |= settled
        self._slots = {at: slot for at, slot in self._slots.items() if at not in settled}
        self._done = [slot for slot in self._done if slot.position not in settled]
        self._backlog = deque(slot for slot in self._backlog if slot.position not in settled)
        self._refused = {at: group for at, group in self._refused.items() if at not in settled}
        self._dropped = [place for place in self._dropped if place not in settled]
        self._settled = set(self.taken)
