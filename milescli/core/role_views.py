"""A group as one of its roles sees it: where roles have rewards of their own, what is compared are
the attempts of one role, never those of two. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from milescli.core.types import Group, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleView:
    """Some trajectories of a group's samples, as a group of their own."""

    group: Group
    """Its samples have the trajectories that share a reward, and that reward; samples without such
    are left out."""
    places: list[tuple[int, list[int]]]
    """[samples of `group`] which sample of the whole group, and which of its trajectories."""


def views_of(group: Group) -> dict[str | None, RoleView]:
    """Return the views by role with a reward of its own; None stands for roles that share the
    episode's. Every trajectory is in one of them."""
    names = dict.fromkeys(role for sample in group.samples for role in sample.role_rewards)
    views = {role: _view(group, role) for role in (None, *names)}
    return {role: view for role, view in views.items() if view.places}


def has_role_rewards(groups: Sequence[Group]) -> bool:
    """Return True if any role has a reward of its own."""
    return any(sample.role_rewards for group in groups for sample in group.samples)


def _view(group: Group, role: str | None) -> RoleView:
    samples, places = list[Sample](), list[tuple[int, list[int]]]()
    for place, sample in enumerate(group.samples):
        own = [
            index
            for index, line in enumerate(sample.trajectories)
            if (line.role if line.role in sample.role_rewards else None) == role
        ]
        if own:
            places.append((place, own))
            reward = sample.reward if role is None else sample.role_rewards[role]
            lines = [sample.trajectories[index] for index in own]
            made = replace(sample, trajectories=lines, reward=reward, role_rewards={})
            samples.append(made if role is None else replace(made, reward_parts={}))
    return RoleView(group=replace(group, samples=samples), places=places)
