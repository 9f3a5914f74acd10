"""What a surrogate of the user's must give."""

from __future__ import annotations

import pytest
import torch

from milescli.core.errors import RecipeError
from milescli.recipe.train import Train
from milescli.train.surrogates import Surrogate, SurrogateTerms, compute_terms
from tests.train.tokens import one_sequence

LOG_RATIO = torch.tensor([0.1, -0.2, 0.3])


def plain(*, log_ratio, advantages, tokens, settings):  # type: ignore[no-untyped-def]
    """As it should be."""
    return SurrogateTerms(loss=-log_ratio.exp() * advantages)


def averaged(*, log_ratio, advantages, tokens, settings):  # type: ignore[no-untyped-def]
    """One number, which would be spread over all tokens by whatever is added to it."""
    return SurrogateTerms(loss=(-log_ratio.exp() * advantages).mean())


def bare(*, log_ratio, advantages, tokens, settings):  # type: ignore[no-untyped-def]
    """Not wrapped."""
    return -log_ratio.exp() * advantages


def _terms(surrogate: Surrogate) -> SurrogateTerms:
    return compute_terms(
        surrogate,
        log_ratio=LOG_RATIO,
        advantages=torch.ones(3),
        tokens=one_sequence(LOG_RATIO),
        settings=Train(),
    )


def test_a_loss_for_each_position_passes() -> None:
    assert torch.equal(_terms(plain).loss, -LOG_RATIO.exp())


@pytest.mark.parametrize(
    ("surrogate", "gave"), [(averaged, r"a loss of shape \[\]"), (bare, "a Tensor")]
)
def test_anything_else_is_named(surrogate: Surrogate, gave: str) -> None:
    with pytest.raises(RecipeError, match=f"the surrogate `{surrogate.__name__}` returned {gave}"):
        _terms(surrogate)
