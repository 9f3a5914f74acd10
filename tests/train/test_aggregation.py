"""What a token weighs and what a sample counts."""

from __future__ import annotations

import pytest

from milescli.core.errors import RecipeError
from milescli.core.plug_points import AGGREGATIONS
from milescli.recipe.train import Train
from milescli.train.aggregation import LossShare, share_of
from milescli.workers.isolated import resolve_isolated


def _share(name: str, num_tokens: int) -> LossShare:
    return resolve_isolated(AGGREGATIONS, name)(num_tokens=num_tokens, settings=Train())


def test_a_token_mean_counts_tokens_and_a_sequence_mean_counts_samples() -> None:
    assert _share("token_mean", 4) == LossShare(token_weight=1.0, count=4.0)
    assert _share("sequence_mean", 4) == LossShare(token_weight=0.25, count=1.0)


def test_an_unknown_aggregation_is_refused_by_its_key() -> None:
    with pytest.raises(RecipeError, match="no aggregation `token_men`") as caught:
        resolve_isolated(AGGREGATIONS, "token_men")
    assert caught.value.fixes == ["--set train.aggregation=token_mean"]


def _weightless(*, num_tokens: int, settings: Train) -> int:
    return num_tokens


def test_what_is_no_share_is_named() -> None:
    with pytest.raises(RecipeError, match="the aggregation `_weightless` returned 4"):
        share_of(_weightless, num_tokens=4, settings=Train())  # type: ignore[arg-type]
