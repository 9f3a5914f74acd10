"""A soft gate instead of a clip."""

from __future__ import annotations

import torch

from milescli.recipe.train import Train
from milescli.train.packed_tokens import PackedTokens
from milescli.train.surrogates import SurrogateTerms


def sapo(
    *, log_ratio: torch.Tensor, advantages: torch.Tensor, tokens: PackedTokens, settings: Train
) -> SurrogateTerms:
    """-f(r) A with f(r) = 4 sigmoid(tau (r - 1)) / tau; tau = `soft_clip.positive` where A > 0,
    else `soft_clip.negative` (SAPO, arXiv 2511.20347). Its slope at r = 1 is that of r, and
    falls on both sides."""
    soft = settings.soft_clip
    ratio = log_ratio.exp()
    tau = torch.where(advantages > 0, soft.positive, soft.negative)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return SurrogateTerms(loss=-gate * advantages, figures={"ratio_mean": ratio.detach()})
