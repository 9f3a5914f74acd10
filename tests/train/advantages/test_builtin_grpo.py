"""Group-relative advantages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.core.errors import RecipeError
from milescli.core.plug_points import ADVANTAGES
from milescli.recipe.train import Train
from milescli.train.advantages import estimate, grpo
from milescli.workers.isolated import resolve_isolated
from tests.samples import rewarded


def _compute(rewards: list[list[float]], normalize_std: str) -> list[list[float]]:
    groups = [rewarded(row) for row in rewards]
    return estimate(grpo, groups, settings=Train(normalize_std=normalize_std))


def test_without_std_they_are_the_centred_rewards() -> None:
    assert _compute([[1, 0, 0, 1], [3, 1]], "none") == [[0.5, -0.5, -0.5, 0.5], [1, -1]]


def test_with_the_groups_std_each_group_stands_alone() -> None:
    (one, other) = _compute([[1, 0], [100, 0]], "group")
    assert one == pytest.approx([2**-0.5, -(2**-0.5)], rel=1e-5)
    assert other == pytest.approx(one, rel=1e-5)


def test_with_the_batchs_std_groups_keep_their_scale() -> None:
    (one, other) = _compute([[1, 0], [100, 0]], "batch")
    assert other[0] == pytest.approx(100 * one[0], rel=1e-9)


@given(
    st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=1, max_size=4),
    st.sampled_from(["group", "batch", "none"]),
)
def test_each_group_sums_to_zero(rewards: list[list[float]], normalize_std: str) -> None:
    for row, source in zip(_compute(rewards, normalize_std), rewards, strict=True):
        assert len(row) == len(source)
        assert sum(row) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("normalize_std", ["group", "batch", "none"])
def test_equal_rewards_teach_nothing(normalize_std: str) -> None:
    assert _compute([[1, 1, 1]], normalize_std) == [[0, 0, 0]]
    assert _compute([[0.3]], normalize_std) == [[0]]


def test_an_unknown_estimator_is_refused_by_name() -> None:
    with pytest.raises(RecipeError, match="grpi") as caught:
        resolve_isolated(ADVANTAGES, "grpi")
    assert caught.value.fixes == ["--set train.advantage=grpo"]


@pytest.mark.parametrize(
    ("estimator", "said"),
    [
        (lambda *, groups, settings: [[0.0]], r"returned \[1\] values per group"),
        (lambda *, groups, settings: [[0.0, float("nan")]], "returned nan"),
    ],
)
def test_what_an_estimator_of_the_user_gives_is_checked(estimator, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        estimate(estimator, [rewarded([1.0, 0.0])], settings=Train())
