"""Token losses against sums written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milescli.train.losses import PolicyLoss, clipped_surrogate, kl_estimate, policy_terms

logprob = st.floats(-8, 0, allow_nan=False)
advantage = st.floats(-3, 3, allow_nan=False)


def _naive(new: float, old: float, value: float, low: float, high: float) -> tuple[float, bool]:
    ratio = math.exp(new - old)
    bounded = max(min(ratio, 1 + high), 1 - low)
    return -min(ratio * value, bounded * value), (value > 0 and ratio > 1 + high) or (
        value < 0 and ratio < 1 - low
    )


@given(st.lists(st.tuples(logprob, logprob, advantage), min_size=1, max_size=20))
def test_the_surrogate_is_the_lower_of_the_plain_and_the_clipped_term(
    rows: list[tuple[float, float, float]],
) -> None:
    new, old, values = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)
    )
    loss, ratio, clipped = clipped_surrogate(
        new, old, advantages=values, clip_low=0.2, clip_high=0.28
    )
    for index, (one, other, value) in enumerate(rows):
        expected, is_clipped = _naive(one, other, value, 0.2, 0.28)
        assert loss[index].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert ratio[index].item() == pytest.approx(math.exp(one - other))
        assert bool(clipped[index]) == is_clipped


def test_a_clipped_token_has_no_gradient_and_a_free_one_has() -> None:
    new = torch.tensor([0.5, 0.1, -0.5, 0.5], requires_grad=True)
    values = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss, _, clipped = clipped_surrogate(
        new, torch.zeros(4), advantages=values, clip_low=0.2, clip_high=0.28
    )
    loss.sum().backward()
    assert clipped.tolist() == [True, False, True, False]
    assert [value == 0 for value in new.grad.tolist()] == [True, False, True, False]


def test_the_upper_bound_is_its_own() -> None:
    new = torch.log(torch.tensor([1.25, 1.25]))
    for high, expected in ((0.2, [True, True]), (0.28, [False, False])):
        _, _, clipped = clipped_surrogate(
            new, torch.zeros(2), advantages=torch.ones(2), clip_low=0.2, clip_high=high
        )
        assert clipped.tolist() == expected


@given(logprob, logprob)
def test_kl_estimates_are_their_formulas(new: float, reference: float) -> None:
    one, other = (
        torch.tensor(new, dtype=torch.float64),
        torch.tensor(reference, dtype=torch.float64),
    )
    difference = new - reference
    assert kl_estimate(one, other, kind="k1").item() == pytest.approx(difference)
    assert kl_estimate(one, other, kind="k2").item() == pytest.approx(difference**2 / 2)
    k3 = kl_estimate(one, other, kind="k3").item()
    assert k3 == pytest.approx(math.exp(-difference) - 1 + difference, rel=1e-6, abs=1e-9)
    assert k3 >= 0


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_have_the_kl_as_their_mean(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference = (
        torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2)
    )
    exact = (policy.exp() * (policy - reference)).sum()
    assert (policy.exp() * kl_estimate(policy, reference, kind=kind)).sum().item() == pytest.approx(
        exact.item()
    )


def test_terms_add_up() -> None:
    new, old, reference = (
        torch.tensor([-1.0, -2.0]),
        torch.tensor([-1.1, -2.5]),
        torch.tensor([-1.3, -1.9]),
    )
    entropy, values = torch.tensor([0.7, 0.9]), torch.tensor([1.0, -1.0])
    rule = PolicyLoss(
        clip_low=0.2, clip_high=0.28, kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01
    )
    terms = policy_terms(
        new, entropy, old_logprobs=old, advantages=values, reference_logprobs=reference, rule=rule
    )
    torch.testing.assert_close(terms.loss, terms.surrogate + 0.1 * terms.kl - 0.01 * entropy)
    alone = policy_terms(
        new, entropy, old_logprobs=old, advantages=values, reference_logprobs=None, rule=rule
    )
    assert alone.kl.abs().max() == 0
    torch.testing.assert_close(alone.loss, terms.surrogate - 0.01 * entropy)
