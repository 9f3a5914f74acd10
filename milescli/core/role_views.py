"""Views of a group for single roles: if roles have rewards of their own, only trajectories of the
same role are compared. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from milescli.core.types import Group, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleView:
    """Holds some trajectories of a group's samples as a group of their own."""

    group: Group
    """Its samples have the trajectories that share a reward, and that reward; samples without such
    trajectories are left out."""
    places: list[tuple[int, list[int]]]
    """[samples of `group`] index of the sample in the whole group, and of its trajectories."""


def views_of(group: Group) -> dict[str | None, RoleView]:
    """Return role -> view, for roles with a reward of their own; None stands for roles that share
    the episode's. Every trajectory is in one view."""
    parts = _parts(group)
    return {role: _view(group, role, parts[role]) for role in _in_order(group, parts)}


def rewards_by_role(group: Group) -> dict[str | None, list[float | None]]:
    """Return the rewards of the views of `views_of`, which takes longer."""
    return {
        role: [_reward(group.samples[place], role) for place, _ in places]
        for role, places in _parts(group).items()
    }


def has_role_rewards(groups: Sequence[Group]) -> bool:
    """Return True if any role has a reward of its own."""
    return any(sample.role_rewards for group in groups for sample in group.samples)


_Places = list[tuple[int, list[int]]]


def _parts(group: Group) -> dict[str | None, _Places]:
    """Return the places (as in RoleView) of the trajectories of each role that has a reward of its
    own; None stands for all other roles."""
    parts: dict[str | None, _Places] = {}
    for place, sample in enumerate(group.samples):
        own: dict[str | None, list[int]] = {}
        for index, line in enumerate(sample.trajectories):
            role = line.role if line.role in sample.role_rewards else None
            own.setdefault(role, []).append(index)
        for role, lines in own.items():
            parts.setdefault(role, []).append((place, lines))
    return parts


def _in_order(group: Group, parts: dict[str | None, _Places]) -> list[str | None]:
    """Return the names in order: the episode's reward first, then roles in the order in which
    samples name them."""
    names = dict.fromkeys(role for sample in group.samples for role in sample.role_rewards)
    return [role for role in (None, *names) if role in parts]


def _reward(sample: Sample, role: str | None) -> float | None:
    return sample.reward if role is None else sample.role_rewards[role]


def _view(group: Group, role: str | None, places: _Places) -> RoleView:
    changes: dict[str, object] = {"role_rewards": {}}
    if role is not None:
        changes["reward_parts"] = {}
    samples = [
        replace(
            sample := group.samples[place],
            trajectories=[sample.trajectories[index] for index in lines],
            reward=_reward(sample, role),
            **changes,
        )
        for place, lines in places
    ]
    return RoleView(group=replace(group, samples=samples), places=places)
