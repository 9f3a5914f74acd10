"""KL estimates against sums written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milescli.train.kl import kl_estimate

logprob = st.floats(-8, 0, allow_nan=False)


@given(logprob, logprob)
def test_kl_estimates_are_their_formulas(new: float, reference: float) -> None:
    one = torch.tensor(new, dtype=torch.float64)
    other = torch.tensor(reference, dtype=torch.float64)
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
    estimate = (policy.exp() * kl_estimate(policy, reference, kind=kind)).sum()
    assert estimate.item() == pytest.approx(exact.item())


def test_one_unlikely_token_cannot_make_k3_infinite() -> None:
    policy = torch.tensor([-150.0, -1.0], requires_grad=True)
    loss = kl_estimate(policy, torch.tensor([-1.0, -1.0]), kind="k3").sum()
    loss.backward()
    assert loss.isfinite() and policy.grad is not None and policy.grad.isfinite().all()
