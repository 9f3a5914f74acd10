"""Which of the groups that over-sampling began are trained on. `rollout.selection` names a way:
built in here, an entry point, or an import path."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import pvariance
from typing import Protocol

from milescli.core.errors import RecipeError
from milescli.core.types import Group
from milescli.core.user_code import mend
from milescli.recipe.schema import Rollout

FIRST = "first"
"""Needs no group but those it takes, so that the others can be given up."""


class Selection(Protocol):
    """A plug-in of `rollout.selection`."""

    def __call__(self, *, groups: Sequence[Group], count: int, settings: Rollout) -> Sequence[int]:
        """Places of the `count` groups to train on. `groups`: those that the filter kept, more than
        `count`, in the order of their prompts."""
        ...


def selected(
    choose: Selection, groups: Sequence[Group], *, count: int, settings: Rollout
) -> list[Group]:
    """Return the chosen groups in the order of their prompts; all where there are no more than
    `count`. Raises RecipeError."""
    if len(groups) <= count:
        return list(groups)
    said = choose(groups=groups, count=count, settings=settings)
    places = places_of(said, "selection", settings.selection, size=len(groups), count=count)
    return [groups[place] for place in sorted(places)]


def places_of(said: object, kind: str, name: str, *, size: int, count: int) -> list[int]:
    """Return `count` different places of a list of `size`, as a plug-in chose them. Raises
    RecipeError where they are none."""
    try:
        places = [int(place) for place in said]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        places = []
    if len(set(places)) == count == len(places) and all(0 <= place < size for place in places):
        return places
    raise RecipeError(
        f"the {kind} `{name}` gave {said!r:.200}",
        why=f"of {size} it chooses {count}: different whole numbers from 0 to {size - 1}",
        fix=mend(name),
    )


def first(*, groups: Sequence[Group], count: int, settings: Rollout) -> Sequence[int]:
    """Take those that are done first in a run; the first of a list."""
    return range(count)


def variance(*, groups: Sequence[Group], count: int, settings: Rollout) -> Sequence[int]:
    """Take those whose rewards differ most; of equal ones, the earlier. The gradient of a group
    grows with the spread of its rewards."""
    return sorted(range(len(groups)), key=lambda place: -pvariance(groups[place].rewards))[:count]
