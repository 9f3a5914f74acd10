"""Token losses of a policy step, as pure functions on tensors: clipped surrogate, KL against a
reference, entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """How a policy step is differentiated."""

    clip_low: float
    clip_high: float
    kl_coef: float
    kl_estimator: KlEstimator
    entropy_coef: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerms:
    """Per token, all [T]; only `loss` is differentiated."""

    loss: torch.Tensor
    """surrogate + kl_coef * kl - entropy_coef * entropy"""
    surrogate: torch.Tensor
    ratio: torch.Tensor
    """pi / pi_old"""
    clipped: torch.Tensor
    """bool: the clip cut this token's gradient off."""
    kl: torch.Tensor
    """Zeros without a reference."""


def policy_terms(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    *,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    reference_logprobs: torch.Tensor | None,
    rule: PolicyLoss,
) -> PolicyTerms:
    """The loss of every token; all tensors [T]. Off the loss mask the values mean nothing and are
    weighted by 0."""
    surrogate, ratio, clipped = clipped_surrogate(
        logprobs,
        old_logprobs,
        advantages=advantages,
        clip_low=rule.clip_low,
        clip_high=rule.clip_high,
    )
    kl = (
        torch.zeros_like(logprobs)
        if reference_logprobs is None
        else kl_estimate(logprobs, reference_logprobs, kind=rule.kl_estimator)
    )
    loss = surrogate
    if reference_logprobs is not None and rule.kl_coef:
        loss = loss + rule.kl_coef * kl
    if rule.entropy_coef:
        loss = loss - rule.entropy_coef * entropy
    return PolicyTerms(
        loss=loss,
        surrogate=surrogate.detach(),
        ratio=ratio.detach(),
        clipped=clipped,
        kl=kl.detach(),
    )


def clipped_surrogate(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    *,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = pi / pi_old; also r, and where the
    clip is active.

    PPO (arXiv 1707.06347, eq. 7) with the separate upper bound of DAPO (arXiv 2503.14476, eq. 10,
    "clip-higher").
    """
    ratio = torch.exp(logprobs - old_logprobs)
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    clipped = ((advantages > 0) & (ratio > 1.0 + clip_high)) | (
        (advantages < 0) & (ratio < 1.0 - clip_low)
    )
    return loss, ratio, clipped.detach()


def kl_estimate(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, *, kind: KlEstimator
) -> torch.Tensor:
    """Per-token estimate of KL(pi || reference) from tokens sampled by pi; d = log pi - log
    reference.

    k1 = d (unbiased), k2 = d^2 / 2 (its gradient is that of the KL), k3 = exp(-d) - 1 + d
    (unbiased, never negative): J. Schulman, "Approximating KL divergence" (2020); k3 is eq. 4 of
    GRPO (arXiv 2402.03300).
    """
    difference = logprobs - reference_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    return torch.expm1(-difference) + difference
