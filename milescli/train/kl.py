"""Compares the policy with other policies, token by token: computes the log-ratio to the old policy
at a level (`train.ratio`), and estimates the KL divergence from the reference, or from an earlier
version of the policy."""

from __future__ import annotations

from milescli.platform.lazy import torch
from milescli.recipe.train import KlEstimator, Ratio
from milescli.train.packed_tokens import PackedTokens

MAX_LOG_RATIO = 20.0
"""Differences of log-probs are clamped to this before they become exponents, which also cuts the
gradient: exp(20) is 5e8, of which float32 still keeps seven digits, and exp(89) is infinite."""
LOW_VAR_MAX = 10.0
"""Upper bound of `low_var`, in nats."""


def kl_estimate(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, *, kind: KlEstimator
) -> torch.Tensor:
    """Estimate KL(pi || reference) at each token, from tokens sampled by pi; d = log pi - log
    reference. k1 = d (unbiased), k2 = d^2 / 2 (its gradient is that of the KL), k3 = exp(-d) - 1 +
    d (unbiased, never negative): J. Schulman, "Approximating KL divergence" (2020); k3 is eq. 4 of
    GRPO (arXiv 2402.03300), with d clamped to +-MAX_LOG_RATIO, gradient included. low_var: k3, at
    most LOW_VAR_MAX."""
    difference = logprobs - reference_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    difference = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    estimate = torch.expm1(-difference) + difference
    return estimate if kind == "k3" else estimate.clamp(max=LOW_VAR_MAX)


_TINY = 1e-8
"""Smallest probability of all other tokens together: that of a likely token rounds to 1 in
float32."""


def binary_kl(logprobs: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return [S] KL(p || q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)) between each token and
    all other tokens taken as one; p = exp(logprobs), q = exp(others)."""
    rest = (-torch.expm1(logprobs)).clamp(min=_TINY)
    rest_of_others = (-torch.expm1(others)).clamp(min=_TINY)
    return logprobs.exp() * (logprobs - others) + rest * (rest / rest_of_others).log()


def log_ratio_at(level: Ratio, log_ratio: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
    """Return the log-ratio at a level, [S] -> [S], differentiable. token: unchanged. sequence: the
    mean over the trained tokens of the sequence, log s_i of GSPO (arXiv 2507.18071).
    sequence_token: the value of that mean, with the gradient of the token's own (GSPO-token)."""
    if level == "token":
        return log_ratio
    count = tokens.sum_by_sequence(tokens.loss_mask).clamp(min=1.0)
    mean = tokens.spread(tokens.sum_by_sequence(log_ratio) / count)
    return mean if level == "sequence" else mean.detach() + log_ratio - log_ratio.detach()
