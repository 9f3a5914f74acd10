"""Defines what a resumed run needs of groups that were sampled and not yet trained on: the
interface through which the collector records and reads them (Journal), and the selection of records
that a resumed run may use (`select_usable`). The runtime writes the files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from milescli.core.types import Group, Prompt
from milescli.rollout.collect.group_record import GroupHead


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """Records how a step collected its groups, so that a resumed run collects the same in the same
    order."""

    step: int
    start: int
    """Position of the source before the step's first prompt."""
    end: int
    """Position of the source after the step's last prompt."""
    draws: list[int]
    """Number of prompts of each call to the source."""
    kept: list[int]
    """Positions of the groups that the step trains on, in this order."""
    refused: list[int]
    """Positions of the groups that the filter rejected."""
    dropped: list[int] = field(default_factory=list)
    """Positions of prompts that are skipped from this step on, because their groups were too old.
    """

    @property
    def positions(self) -> list[int]:
        """Return the positions of all its groups."""
        return [*self.kept, *self.refused]


class Journal(Protocol):
    """Records and returns groups. Belongs to one event loop, and never blocks it."""

    def record_group(self, position: int, group: Group) -> None:
        """Record a group that is sampled and scored."""

    def record_batch(self, batch: BatchRecord) -> None:
        """Record that all groups of a step are complete."""

    def batch(self, step: int, *, start: int) -> BatchRecord | None:
        """Return how this step collected its groups before; None if unknown, or if its prompts
        began at another position."""

    def has_group(self, step: int, position: int) -> bool:
        """Return True if the group of this prompt is recorded, and `step` may train on it: neither
        too old for the step nor newer than its weights."""

    async def group(self, step: int, position: int, prompt: Prompt) -> Group | None:
        """Return the recorded group of this prompt, if `step` may train on it."""


class NoJournal:
    """Implements Journal without recording anything."""

    def record_group(self, position: int, group: Group) -> None:
        """Record nothing."""

    def record_batch(self, batch: BatchRecord) -> None:
        """Record nothing."""

    def batch(self, step: int, *, start: int) -> BatchRecord | None:
        """Return None: nothing is recorded."""
        return None

    def has_group(self, step: int, position: int) -> bool:
        """Return False: nothing is recorded."""
        return False

    async def group(self, step: int, position: int, prompt: Prompt) -> Group | None:
        """Return None: nothing is recorded."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableRecords:
    """Holds the records that a resumed run may use."""

    newest: int
    """Newest weight version that the resumed run will train from recorded groups alone; groups that
    newer weights sampled are unusable."""
    groups: frozenset[int]
    """Positions of the usable groups."""
    batches: Mapping[int, BatchRecord]
    """Step -> the record of its batch."""


def select_usable(
    heads: Mapping[int, GroupHead],
    batches: Iterable[BatchRecord],
    *,
    step: int,
    version: int,
    position: int,
    reproduced: Collection[int],
) -> UsableRecords:
    """Select the usable records of a journal. `heads`: by position of the prompt. The checkpoint of
    `step` has the weights `version`, and its source was at `position`. Groups sampled by these or
    older weights are usable. The weights after each next step are trained again if all groups of
    that step are recorded and usable. Groups that newer weights sampled are usable if their
    position is in `reproduced`, which means that those weights, too, came from this checkpoint and
    by the same training (same layout, same code), so that they are equal bit for bit."""
    by_step = {batch.step: batch for batch in batches}
    sound = {
        place: head
        for place, head in heads.items()
        if head.newest <= version or place in reproduced
    }
    newest, after = version, step + 1
    while (batch := by_step.get(after)) is not None:
        if batch.start != position or not _has_all(sound, batch, newest):
            break
        newest, after, position = newest + 1, after + 1, batch.end
    groups = frozenset(place for place, head in sound.items() if head.newest <= newest)
    return UsableRecords(
        newest=newest,
        groups=groups,
        batches={
            number: batch
            for number, batch in by_step.items()
            if number <= step or groups.issuperset(batch.positions)
        },
    )


def _has_all(heads: Mapping[int, GroupHead], batch: BatchRecord, newest: int) -> bool:
    return all(place in heads and heads[place].newest <= newest for place in batch.positions)
