"""PPO's clipped surrogate."""

from __future__ import annotations

import torch

from milescli.recipe.schema import Train
from milescli.train.packed_tokens import PackedTokens
from milescli.train.surrogates import SurrogateTerms


def clip(
    *,
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    tokens: PackedTokens,
    settings: Train,
) -> SurrogateTerms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = pi / pi_old.

    PPO (arXiv 1707.06347, eq. 7) with the separate upper bound of DAPO (arXiv 2503.14476, eq. 10,
    "clip-higher").
    """
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    ratio = torch.exp(log_ratio)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    return SurrogateTerms(
        loss=loss, figures={"clip_fraction": clipped.float(), "ratio_mean": ratio.detach()}
    )
