"""The clipped surrogate against sums written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milescli.core.plug_points import SURROGATES
from milescli.recipe.train import Train
from milescli.train.surrogates import SurrogateTerms
from tests.train.tokens import one_sequence

logprob = st.floats(-8, 0, allow_nan=False)
advantage = st.floats(-3, 3, allow_nan=False)


def _clip(new: torch.Tensor, old: torch.Tensor, values: torch.Tensor, **settings) -> SurrogateTerms:
    return SURROGATES.load("clip")(
        log_ratio=new - old,
        advantages=values,
        tokens=one_sequence(new),
        settings=Train(**{"clip_low": 0.2, "clip_high": 0.28, **settings}),
    )


def _naive(new: float, old: float, value: float) -> tuple[float, bool]:
    ratio = math.exp(new - old)
    bounded = max(min(ratio, 1.28), 0.8)
    is_clipped = (value > 0 and ratio > 1.28) or (value < 0 and ratio < 0.8)
    return -min(ratio * value, bounded * value), is_clipped


@given(st.lists(st.tuples(logprob, logprob, advantage), min_size=1, max_size=20))
def test_the_surrogate_is_the_lower_of_the_plain_and_the_clipped_term(
    rows: list[tuple[float, float, float]],
) -> None:
    new, old, values = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)
    )
    terms = _clip(new, old, values)
    for index, (one, other, value) in enumerate(rows):
        expected, is_clipped = _naive(one, other, value)
        assert terms.loss[index].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert terms.figures["ratio_mean"][index].item() == pytest.approx(math.exp(one - other))
        assert bool(terms.figures["clip_fraction"][index]) == is_clipped


def test_a_clipped_token_has_no_gradient_and_a_free_one_has() -> None:
    new = torch.tensor([0.5, 0.1, -0.5, 0.5], requires_grad=True)
    terms = _clip(new, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]))
    terms.loss.sum().backward()
    assert terms.figures["clip_fraction"].tolist() == [1, 0, 1, 0]
    assert [value == 0 for value in new.grad.tolist()] == [True, False, True, False]


def test_a_token_of_negative_advantage_pulls_with_its_whole_ratio_unless_bounded_twice() -> None:
    values = torch.tensor([-1.0, -1.0, 1.0])
    gradients = {}
    for c in (None, 3.0):
        new = torch.tensor([6.0, 0.5, 6.0], requires_grad=True)
        terms = _clip(new, torch.zeros(3), values, dual_clip=c)
        terms.loss.sum().backward()
        gradients[c] = new.grad
        if c is not None:
            assert terms.loss[0].item() == 3.0
            assert terms.figures["dual_clip_fraction"].tolist() == [1, 0, 0]
        else:
            assert "dual_clip_fraction" not in terms.figures
    assert gradients[None][0].item() == pytest.approx(math.exp(6.0), rel=1e-5)
    assert gradients[3.0][0].item() == 0.0
    assert torch.equal(gradients[None][1:], gradients[3.0][1:])


@pytest.mark.parametrize(("high", "expected"), [(0.2, [1, 1]), (0.28, [0, 0])])
def test_the_upper_bound_is_its_own(high: float, expected: list[int]) -> None:
    new = torch.log(torch.tensor([1.25, 1.25]))
    terms = _clip(new, torch.zeros(2), torch.ones(2), clip_high=high)
    assert terms.figures["clip_fraction"].tolist() == expected
