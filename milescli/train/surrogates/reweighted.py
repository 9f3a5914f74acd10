"""Surrogates whose gradient is that of the log-prob, times a weight that has none."""

from __future__ import annotations

import torch

from milescli.recipe.train import Train
from milescli.train.kl import MAX_LOG_RATIO
from milescli.train.packed_tokens import PackedTokens
from milescli.train.surrogates import SurrogateTerms


def reinforce(
    *, log_ratio: torch.Tensor, advantages: torch.Tensor, tokens: PackedTokens, settings: Train
) -> SurrogateTerms:
    """-A log pi (REINFORCE, Williams 1992; GPG, arXiv 2504.02546). No ratio: right
    for the policy that sampled alone."""
    return SurrogateTerms(loss=-advantages * tokens.logprobs)


def cispo(
    *, log_ratio: torch.Tensor, advantages: torch.Tensor, tokens: PackedTokens, settings: Train
) -> SurrogateTerms:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi (CISPO of MiniMax-M1, arXiv
    2506.13585): a clipped token keeps a bounded gradient instead of none. sg: no gradient."""
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(low, high)
    return SurrogateTerms(
        loss=-weight * advantages * tokens.logprobs,
        figures={"clip_fraction": (weight != ratio).float(), "ratio_mean": ratio},
    )


def topr(
    *, log_ratio: torch.Tensor, advantages: torch.Tensor, tokens: PackedTokens, settings: Train
) -> SurrogateTerms:
    """-sg(w) A log pi; w = 1 where A >= 0, else min(1, ratio of the whole sequence) (TOPR, arXiv
    2503.14286): a bad response that the policy has left already is pushed no further."""
    whole = tokens.sum_by_sequence(log_ratio.detach()).clamp(-MAX_LOG_RATIO, 0.0)
    weight = torch.where(advantages < 0, tokens.spread(whole.exp()), 1.0)
    return SurrogateTerms(
        loss=-weight * advantages * tokens.logprobs, figures={"taper_mean": weight}
    )
