"""A geometric mean of the ratios of a sequence."""

from __future__ import annotations

import torch

from milescli.recipe.train import Train
from milescli.train.packed_tokens import PackedTokens
from milescli.train.surrogates import SurrogateTerms


def gmpo(
    *, log_ratio: torch.Tensor, advantages: torch.Tensor, tokens: PackedTokens, settings: Train
) -> SurrogateTerms:
    """-A exp(mean over the sequence of the clipped log r) (GMPO, arXiv 2507.20673). log r of
    each token is cut at -clip_low and +clip_high, on the side that its advantage drives it to.

    The loss is that of the sequence, at each of its tokens: `sequence_mean` counts it once.
    """
    bounded = log_ratio.clamp(-settings.clip_low, settings.clip_high)
    low, high = torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded)
    kept = torch.where(
        advantages > 0, low, torch.where(advantages < 0, high, torch.zeros_like(low))
    )
    count = tokens.sum_by_sequence(tokens.loss_mask).clamp(min=1.0)
    ratio = tokens.spread((tokens.sum_by_sequence(kept) / count).exp())
    mean_advantage = tokens.spread(tokens.sum_by_sequence(advantages) / count)
    return SurrogateTerms(
        loss=-ratio * mean_advantage,
        figures={
            "clip_fraction": (log_ratio != kept).float() * (advantages != 0),
            "ratio_mean": ratio.detach(),
        },
    )
