"""Decides which groups are trained on. `rollout.filter` names a filter: built in here, an entry
point, or an import path; the collector replaces the groups that it rejects."""

from __future__ import annotations

from statistics import fmean
from typing import Protocol, cast

from milescli.core.errors import RecipeError
from milescli.core.registry import Registry
from milescli.core.role_views import has_role_rewards, views_of
from milescli.core.types import Group
from milescli.core.user_code import mend
from milescli.recipe.schema import Rollout
from milescli.workers.isolated import resolve_isolated


class GroupFilter(Protocol):
    """A plug-in of `rollout.filter`."""

    def __call__(self, *, group: Group, settings: Rollout) -> bool:
        """True: keep the group. Called once a group, when all of its samples are scored."""
        ...


FILTERS = Registry(
    "filter",
    {
        "none": "milescli.rollout.collect.filters:keep_all",
        "zero_variance": "milescli.rollout.collect.filters:zero_variance",
        "pass_rate": "milescli.rollout.collect.filters:pass_rate",
    },
    signature=("group", "settings"),
)


def load_filter(name: str) -> GroupFilter:
    """Raises RecipeError where `rollout.filter` names nothing that fits."""
    return cast(GroupFilter, resolve_isolated(FILTERS, name, key="rollout.filter"))


def is_kept(keep: GroupFilter, group: Group, *, settings: Rollout) -> bool:
    """What the filter says. Raises RecipeError where that is neither yes nor no."""
    said = keep(group=group, settings=settings)
    return yes_or_no(said, "filter", settings.filter, of=f"prompt {group.prompt.index}")


def yes_or_no(said: object, kind: str, name: str, *, of: str) -> bool:
    """What the filter `name` said, as a bool. Raises RecipeError where it is neither."""
    if said in (True, False):
        return bool(said)
    raise RecipeError(
        f"the {kind} `{name}` gave {said!r}",
        why=f"of {of}; it says True to keep, else False",
        fix=mend(name),
    )


def keep_all(*, group: Group, settings: Rollout) -> bool:
    """Keep every group."""
    return True


def zero_variance(*, group: Group, settings: Rollout) -> bool:
    """Refuses groups whose rewards are all equal: their advantages are zero (dynamic sampling of
    DAPO, arXiv 2503.14476)."""
    return not has_zero_variance(group)


def pass_rate(*, group: Group, settings: Rollout) -> bool:
    """Refuses groups whose mean reward is below `pass_rate_low` or above `pass_rate_high`: prompts
    that are too hard, or too easy, for the policy of now."""
    return settings.pass_rate_low <= fmean(group.rewards) <= settings.pass_rate_high


def has_zero_variance(group: Group) -> bool:
    """Whether all rewards of the group are equal, and those of each role."""
    views = views_of(group).values() if has_role_rewards([group]) else ()
    return all(len(set(each.rewards)) <= 1 for each in (group, *(view.group for view in views)))
