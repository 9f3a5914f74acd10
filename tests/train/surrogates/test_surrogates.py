"""Each surrogate against its formula and its gradient, written out token by token in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milescli.core.plug_points import SURROGATES
from milescli.recipe.train import SoftClip, Train
from tests.train.tokens import ragged

SETTINGS = Train(clip_low=0.2, clip_high=0.3, soft_clip=SoftClip(positive=1.0, negative=1.5))
Expected = tuple[float, float]
"""(loss, its derivative by the log-prob of the token itself)"""


def _reinforce(new: float, old: float, value: float, whole: float) -> Expected:
    return -value * new, -value


def _cispo(new: float, old: float, value: float, whole: float) -> Expected:
    weight = min(max(math.exp(new - old), 0.8), 1.3)
    return -weight * value * new, -weight * value


def _topr(new: float, old: float, value: float, whole: float) -> Expected:
    weight = min(math.exp(whole), 1.0) if value < 0 else 1.0
    return -weight * value * new, -weight * value


def _sapo(new: float, old: float, value: float, whole: float) -> Expected:
    ratio, tau = math.exp(new - old), 1.0 if value > 0 else 1.5
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -4 / tau * gate * value, -4 * gate * (1 - gate) * ratio * value


def _dppo_tv(new: float, old: float, value: float, whole: float) -> Expected:
    moved = math.exp(new) - math.exp(old)
    is_kept = moved <= 0.3 if value > 0 else moved >= -0.2
    weight = min(math.exp(new - old), 20.0) * is_kept
    return -weight * value * new, -weight * value


def _dppo_kl(new: float, old: float, value: float, whole: float) -> Expected:
    p, q = math.exp(new), math.exp(old)
    divergence = q * (old - new) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    is_kept = p <= q or divergence <= 0.3 if value > 0 else p >= q or divergence <= 0.2
    weight = min(math.exp(new - old), 20.0) * is_kept
    return -weight * value * new, -weight * value


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("reinforce", _reinforce),
        ("cispo", _cispo),
        ("topr", _topr),
        ("sapo", _sapo),
        ("dppo_tv", _dppo_tv),
        ("dppo_kl", _dppo_kl),
    ],
)
@given(st.integers(0, 400))
def test_losses_and_gradients_are_those_of_the_formulas(
    name: str, formula: Callable[..., Expected], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tokens = ragged(rng, with_logprobs=True)
    assert tokens.logprobs is not None
    count = len(tokens.loss_mask)
    old = tokens.logprobs.detach() + torch.from_numpy(rng.normal(size=count) * 0.4).float()
    old = old.clamp(max=-1e-3)
    values = torch.from_numpy(rng.normal(size=count).astype(np.float32))
    log_ratio = tokens.logprobs - old
    made = SURROGATES.load(name)(
        log_ratio=log_ratio, advantages=values, tokens=tokens, settings=SETTINGS
    )
    torch.where(tokens.loss_mask, made.loss, 0.0).sum().backward()
    new, wholes = tokens.logprobs.detach(), tokens.sum_by_sequence(log_ratio.detach())
    for place in torch.nonzero(tokens.loss_mask).flatten().tolist():
        arguments = (float(new[place]), float(old[place]), float(values[place]))
        loss, slope = formula(*arguments, float(wholes[tokens.places.sequence[place]]))
        assert float(made.loss.detach()[place]) == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert float(tokens.logprobs.grad[place]) == pytest.approx(slope, rel=1e-4, abs=1e-6)


@given(st.integers(0, 400))
def test_gmpo_is_the_geometric_mean_of_ratios_clipped_on_one_side(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = ragged(rng, with_logprobs=True)
    assert tokens.logprobs is not None
    count = len(tokens.loss_mask)
    old = tokens.logprobs.detach() + torch.from_numpy(rng.normal(size=count) * 0.4).float()
    by_sequence = torch.from_numpy(rng.normal(size=tokens.num_sequences).astype(np.float32))
    values = tokens.spread(by_sequence)
    made = SURROGATES.load("gmpo")(
        log_ratio=tokens.logprobs - old, advantages=values, tokens=tokens, settings=SETTINGS
    )
    for sequence in range(tokens.num_sequences):
        own = (tokens.places.sequence == sequence) & tokens.loss_mask
        if not own.any():
            continue
        steps = (tokens.logprobs - old)[own].detach().double().numpy()
        value = float(by_sequence[sequence])
        kept = np.minimum(steps, 0.3) if value > 0 else np.maximum(steps, -0.2)
        expected = -math.exp(kept.mean()) * value
        assert made.loss[own].detach().numpy() == pytest.approx(expected, rel=1e-4)


@given(st.integers(0, 100))
def test_a_soft_gate_begins_as_the_ratio_does(seed: int) -> None:
    tokens = ragged(np.random.default_rng(seed), with_logprobs=True)
    assert tokens.logprobs is not None
    values = torch.ones(len(tokens.loss_mask))
    log_ratio = tokens.logprobs - tokens.logprobs.detach()
    made = SURROGATES.load("sapo")(
        log_ratio=log_ratio, advantages=values, tokens=tokens, settings=SETTINGS
    )
    made.loss.sum().backward()
    assert tokens.logprobs.grad == pytest.approx(-torch.ones(len(values)), rel=1e-6)
