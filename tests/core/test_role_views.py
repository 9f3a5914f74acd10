"""A group as its roles see it: every trajectory once, and never beside another role's."""

from __future__ import annotations

from dataclasses import replace

from milescli.core.role_views import has_role_rewards, rewards_by_role, views_of
from milescli.core.types import Sample
from tests.samples import make_group, make_sample, make_trajectory


def _sample(rewards: dict[str, float], *roles: str) -> Sample:
    lines = [replace(make_trajectory([1], [2, 3]), role=role) for role in roles]
    return replace(make_sample(*lines, reward=0.5), role_rewards=rewards)


def test_each_trajectory_is_in_the_view_of_its_reward() -> None:
    group = make_group(
        [
            _sample({"pro": 1.0, "contra": -1.0}, "pro", "contra", "host", "pro"),
            _sample({"pro": 2.0}, "pro"),  # cut off before the others spoke
        ]
    )
    views = views_of(group)
    assert list(views) == [None, "pro", "contra"] and has_role_rewards([group])
    assert views["pro"].places == [(0, [0, 3]), (1, [0])] and views["pro"].group.rewards == [1, 2]
    assert views["contra"].places == [(0, [1])] and views["contra"].group.rewards == [-1]
    assert views[None].places == [(0, [2])] and views[None].group.rewards == [0.5]
    assert rewards_by_role(group) == {role: view.group.rewards for role, view in views.items()}


def test_where_no_role_has_a_reward_the_view_is_the_group() -> None:
    group = make_group([_sample({}, "pro", "contra")])
    (view,) = views_of(group).values()
    assert view.group == group and not has_role_rewards([group])
