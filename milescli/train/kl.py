"""What the policy is compared by, token by token: the level of its ratio to the old policy
(`train.ratio`), and estimates of its KL divergence from the reference, or from what it was."""

from __future__ import annotations

from milescli.platform.late import torch
from milescli.recipe.train import KlEstimator, Ratio
from milescli.train.packed_tokens import PackedTokens

MAX_LOG_RATIO = 20.0
"""Where a difference of log-probs is an exponent, what lies beyond is cut off, gradient included:
exp(20) is 5e8, of which float32 still keeps seven digits, and exp(89) is infinite."""
LOW_VAR_MAX = 10.0
"""Nats."""


def kl_estimate(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, *, kind: KlEstimator
) -> torch.Tensor:
    """Per-token estimate of KL(pi || reference) from tokens sampled by pi; d = log pi - log
    reference.

    k1 = d (unbiased), k2 = d^2 / 2 (its gradient is that of the KL), k3 = exp(-d) - 1 + d
    (unbiased, never negative): J. Schulman, "Approximating KL divergence" (2020); k3 is eq. 4 of
    GRPO (arXiv 2402.03300), with d cut off at +-MAX_LOG_RATIO, gradient included. low_var: k3, at
    most LOW_VAR_MAX.
    """
    difference = logprobs - reference_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    difference = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    estimate = torch.expm1(-difference) + difference
    return estimate if kind == "k3" else estimate.clamp(max=LOW_VAR_MAX)


_TINY = 1e-8
"""Least probability of all other tokens: that of a token rounds to 1 in float32."""


def binary_kl(logprobs: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """[S] KL(p || q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)) of each token against all
    others as one; p = exp(logprobs), q = exp(others)."""
    rest = (-torch.expm1(logprobs)).clamp(min=_TINY)
    rest_of_others = (-torch.expm1(others)).clamp(min=_TINY)
    return logprobs.exp() * (logprobs - others) + rest * (rest / rest_of_others).log()


def log_ratio_at(level: Ratio, log_ratio: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
    """[S] -> [S], differentiable. token: as it is.

    sequence: the mean over the trained tokens of the sequence, log s_i of GSPO (arXiv
    2507.18071). sequence_token: its value, with the gradient of the token's own (GSPO-token).
    """
    if level == "token":
        return log_ratio
    count = tokens.sum_by_sequence(tokens.loss_mask).clamp(min=1.0)
    mean = tokens.spread(tokens.sum_by_sequence(log_ratio) / count)
    return mean if level == "sequence" else mean.detach() + log_ratio - log_ratio.detach()
