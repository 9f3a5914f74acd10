"""Figures of an evaluation."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.core.errors import RecipeError
from milescli.core.plug_points import METRICS
from milescli.recipe.schema import Evaluation
from milescli.rollout.evaluation.metrics import compute_metrics
from milescli.workers.isolated import resolve_isolated
from tests.samples import rewarded


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=5, max_size=5), min_size=1, max_size=4)
)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(rewards: list[list[float]]) -> None:
    settings = Evaluation(samples_per_prompt=5, metrics="pass_at_k")
    figures = compute_metrics(
        resolve_isolated(METRICS, "pass_at_k"),
        [rewarded(row) for row in rewards],
        settings=settings,
    )
    assert list(figures) == ["pass_at_1", "pass_at_2", "pass_at_4"]
    for k in (1, 2, 4):
        shares = [
            sum(max(subset) > 0 for subset in subsets) / len(subsets)
            for row in rewards
            for subsets in [list(itertools.combinations(row, k))]
        ]
        assert figures[f"pass_at_{k}"] == pytest.approx(sum(shares) / len(shares))


def a_list(*, groups, settings):  # type: ignore[no-untyped-def]
    """No names."""
    return [1.0]


def not_finite(*, groups, settings):  # type: ignore[no-untyped-def]
    """NaN."""
    return {"mine": float("nan")}


@pytest.mark.parametrize(
    ("name", "said"), [("a_list", "no attribute 'items'"), ("not_finite", "finite")]
)
def test_what_are_no_figures_is_named(name: str, said: str) -> None:
    path = f"{__name__}:{name}"
    with pytest.raises(RecipeError, match=f"the metrics `{path}` returned") as refused:
        compute_metrics(
            resolve_isolated(METRICS, path), [rewarded([1.0])], settings=Evaluation(metrics=path)
        )
    assert said in refused.value.why
