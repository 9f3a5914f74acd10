"""Rewards between scoring and training, and which groups are kept."""

from __future__ import annotations

import pytest

from milescli.core.errors import RecipeError
from milescli.core.isolated import resolve_isolated
from milescli.core.plug_points import FILTERS, SHAPINGS
from milescli.core.types import Group
from milescli.recipe.schema import Rollout
from milescli.rollout.collect.filters import is_kept
from milescli.rollout.collect.shaping import shaped
from tests.samples import make_group, make_sample, make_trajectory, rewarded


def doubled(*, group, settings):  # type: ignore[no-untyped-def]
    """A shaping of the user's."""
    return [2 * reward for reward in group.rewards]


def one_only(*, group, settings):  # type: ignore[no-untyped-def]
    """Too few."""
    return [1.0]


def not_numbers(*, group, settings):  # type: ignore[no-untyped-def]
    """NaN."""
    return [float("nan")] * len(group.samples)


def raising(*, group, settings):  # type: ignore[no-untyped-def]
    """Its author's mistake."""
    raise KeyError("difficulty")


def maybe(*, group, settings):  # type: ignore[no-untyped-def]
    """Neither yes nor no."""
    return "perhaps"


def _lengths(*lengths: int) -> Group:
    return make_group(
        [
            make_sample(make_trajectory([1], [2] * length), reward=1.0, index=index)
            for index, length in enumerate(lengths)
        ]
    )


def test_overlong_responses_lose_reward_within_the_buffer() -> None:
    settings = Rollout(
        max_response_tokens=20, shaping="overlong", overlong_buffer=4, overlong_penalty=0.5
    )
    group = shaped(
        resolve_isolated(SHAPINGS, "overlong"), _lengths(1, 16, 18, 20), settings=settings
    )
    assert group.rewards == [1.0, 1.0, 0.75, 0.5]


def test_the_buffer_is_a_fifth_where_nobody_says_how_much() -> None:
    settings = Rollout(max_response_tokens=20)
    group = shaped(resolve_isolated(SHAPINGS, "overlong"), _lengths(16, 20), settings=settings)
    assert group.rewards == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "why"), [("one_only", "1 rewards for 2 samples"), ("not_numbers", "must be finite")]
)
def test_rewards_that_cannot_be_trained_on_are_named(name: str, why: str) -> None:
    path = f"{__name__}:{name}"
    with pytest.raises(RecipeError, match=f"the shaping `{path}` gave") as refused:
        shaped(
            resolve_isolated(SHAPINGS, path), rewarded([0.0, 1.0]), settings=Rollout(shaping=path)
        )
    assert why in refused.value.why


def test_what_a_shaping_raises_is_named_with_its_line() -> None:
    path = f"{__name__}:raising"
    with pytest.raises(RecipeError, match=f"the shaping `{path}` failed") as refused:
        shaped(resolve_isolated(SHAPINGS, path), rewarded([0.0]), settings=Rollout(shaping=path))
    assert "difficulty" in refused.value.why and "test_shaping.py" in refused.value.why


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("none", [1.0, 1.0], True),
        ("zero_variance", [1.0, 1.0], False),
        ("zero_variance", [1.0, 0.0], True),
        ("pass_rate", [1.0, 1.0], False),
        ("pass_rate", [0.0, 0.0], False),
        ("pass_rate", [1.0, 0.0], True),
    ],
)
def test_filters_keep_what_teaches(name: str, rewards: list[float], expected: bool) -> None:
    settings = Rollout(filter=name)
    assert (
        is_kept(resolve_isolated(FILTERS, name), rewarded(rewards), settings=settings) is expected
    )


def test_a_filter_that_says_neither_is_named() -> None:
    path = f"{__name__}:maybe"
    with pytest.raises(RecipeError, match="gave 'perhaps'"):
        is_kept(resolve_isolated(FILTERS, path), rewarded([1.0]), settings=Rollout(filter=path))
