"""Which groups are worth training on. Pure functions by name; the collector replaces what they
refuse."""

from __future__ import annotations

from collections.abc import Callable

from milescli.core.types import Group

GroupFilter = Callable[[Group], bool]
"""True: keep the group."""


def keep_all(group: Group) -> bool:
    """Refuses nothing."""
    return True


def zero_variance(group: Group) -> bool:
    """Refuses groups whose rewards are all equal: their advantages are zero (dynamic sampling of
    DAPO, arXiv 2503.14476)."""
    return not has_zero_variance(group)


def has_zero_variance(group: Group) -> bool:
    """Whether all rewards of the group are equal."""
    return len(set(group.rewards)) <= 1


FILTERS: dict[str, GroupFilter] = {"none": keep_all, "zero_variance": zero_variance}
"""By the names that `rollout.filter` knows."""
