"""Which of the groups that over-sampling began are trained on. `rollout.selection` names a way:
built in here, an entry point, or an import path."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import pvariance
from typing import Protocol, cast

from milescli.core.errors import RecipeError
from milescli.core.registry import Registry
from milescli.core.types import Group
from milescli.core.user_code import mend
from milescli.recipe.schema import Rollout
from milescli.workers.isolated import resolve_isolated

FIRST = "first"
"""Needs no group but those it takes, so that the others can be given up."""


class Selection(Protocol):
    """A plug-in of `rollout.selection`."""

    def __call__(self, *, groups: Sequence[Group], count: int, settings: Rollout) -> Sequence[int]:
        """Places of the `count` groups to train on. `groups`: those that the filter kept, more than
        `count`, in the order of their prompts."""
        ...


SELECTIONS = Registry(
    "selection",
    {
        FIRST: "milescli.rollout.collect.selection:first",
        "variance": "milescli.rollout.collect.selection:variance",
    },
    signature=("groups", "count", "settings"),
)


def load_selection(name: str) -> Selection:
    """Raises RecipeError where `rollout.selection` names nothing that fits."""
    return cast(Selection, resolve_isolated(SELECTIONS, name, key="rollout.selection"))


def selected(
    choose: Selection, groups: Sequence[Group], *, count: int, settings: Rollout
) -> list[Group]:
    """The chosen ones, in the order of their prompts; all where there are no more than `count`.
    Raises RecipeError."""
    if len(groups) <= count:
        return list(groups)
    said = choose(groups=groups, count=count, settings=settings)
    places = places_of(said, "selection", settings.selection, size=len(groups), count=count)
    return [groups[place] for place in sorted(places)]


def places_of(said: object, kind: str, name: str, *, size: int, count: int) -> list[int]:
    """`count` different places of a list of `size`, as somebody has chosen them. Raises RecipeError
    where they are none."""
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
    """In a run, those that are done first; of a list, its first."""
    return range(count)


def variance(*, groups: Sequence[Group], count: int, settings: Rollout) -> Sequence[int]:
    """Those whose rewards differ most; of equal ones, the earlier. The gradient of a group grows
    with the spread of its rewards."""
    return sorted(range(len(groups)), key=lambda place: -pvariance(groups[place].rewards))[:count]
