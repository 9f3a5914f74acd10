"""What a resumed run needs of groups that were sampled and not yet trained on: the interface that
the collector records to and reads from (Journal), and which records precede a checkpoint
(`usable`). The runtime writes the files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from milescli.core.types import Group, Prompt
from milescli.rollout.collect.group_record import GroupHead


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """How the groups of a step were come by: asked for again, they are the same in the same
    order."""

    step: int
    start: int
    """Position of the source before its first prompt."""
    end: int
    """The same after its last."""
    draws: list[int]
    """Prompts taken from the source at a time."""
    kept: list[int]
    """Positions of the groups that the step trains on, in this order."""
    refused: list[int]
    """Records of groups that the filter rejected."""
    dropped: list[int] = field(default_factory=list)
    """Positions of prompts that are skipped from this step on, because their groups were too
    old."""

    @property
    def positions(self) -> list[int]:
        """Return the positions of all its groups."""
        return [*self.kept, *self.refused]


class Journal(Protocol):
    """Belongs to one event loop, and holds nothing of it up."""

    def keep_group(self, position: int, group: Group) -> None:
        """Record a group that is sampled and scored."""

    def keep_batch(self, batch: BatchRecord) -> None:
        """Record that all groups of a step are complete."""

    def batch(self, step: int, *, start: int) -> BatchRecord | None:
        """How this step's groups were come by before; None where that is not known, or its prompts
        began elsewhere."""

    async def group(self, step: int, position: int, prompt: Prompt) -> Group | None:
        """Return the group that was sampled for this prompt before, if `step` may train on it."""


class NoJournal:
    """Implements Journal: nothing is kept, and nothing was."""

    def keep_group(self, position: int, group: Group) -> None:
        """Record nothing."""

    def keep_batch(self, batch: BatchRecord) -> None:
        """Record nothing."""

    def batch(self, step: int, *, start: int) -> BatchRecord | None:
        """Return None: nothing is recorded."""
        return None

    async def group(self, step: int, position: int, prompt: Prompt) -> Group | None:
        """Return None: nothing is recorded."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usable:
    """What a resumed run may take."""

    newest: int
    """Weight version up to which the resumed run is going to be the run before, if its training is:
    what newer weights sampled belongs to a run that cannot be had again."""
    groups: frozenset[int]
    """Positions."""
    batches: Mapping[int, BatchRecord]
    """By step."""


def usable(
    heads: Mapping[int, GroupHead],
    batches: Iterable[BatchRecord],
    *,
    step: int,
    version: int,
    position: int,
    is_same_line: bool,
) -> Usable:
    """Of what a journal holds, by the position of the prompts.

    A checkpoint of `step` has the weights `version`, and the source stood at `position`. What these
    or older weights sampled is of its past. The weights after each next step are had again where
    all groups of that step are: then what they sampled is of the same past, too. `is_same_line`:
    whether training is bit for bit what it was (layout, code); else nothing newer is.
    """
    by_step = {batch.step: batch for batch in batches}
    newest, after = version, step + 1
    while is_same_line and (batch := by_step.get(after)) is not None:
        if batch.start != position or not _has_all(heads, batch, newest):
            break
        newest, after, position = newest + 1, after + 1, batch.end
    groups = frozenset(place for place, head in heads.items() if head.newest <= newest)
    return Usable(
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
