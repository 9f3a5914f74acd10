"""What a policy ratio is of: a token, or its whole sequence. `train.ratio` names one."""

from __future__ import annotations

import torch

from milescli.recipe.train import Ratio
from milescli.train.packed_tokens import PackedTokens


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
