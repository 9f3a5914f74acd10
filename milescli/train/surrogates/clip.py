"""PPO's clipped surrogate."""

from __future__ import annotations

import torch

from milescli.recipe.train import Train
from milescli.train.packed_tokens import PackedTokens
from milescli.train.surrogates import SurrogateTerms


def clip(
    *,
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    tokens: PackedTokens,
    settings: Train,
) -> SurrogateTerms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = pi / pi_old; with `dual_clip` c,
    for A < 0 no more than -c A.

    PPO (arXiv 1707.06347, eq. 7) with the separate upper bound of DAPO (arXiv 2503.14476, eq. 10,
    "clip-higher") and the second bound of dual-clip PPO (arXiv 1912.09729, eq. 5): without it, a
    token of negative advantage that the policy came to like pulls with its whole ratio.
    """
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    ratio = torch.exp(log_ratio)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    figures = {"clip_fraction": clipped.float(), "ratio_mean": ratio.detach()}
    if settings.dual_clip is not None:
        bound = -settings.dual_clip * advantages
        bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
        figures["dual_clip_fraction"] = bounded.float()
    return SurrogateTerms(loss=loss, figures=figures)
