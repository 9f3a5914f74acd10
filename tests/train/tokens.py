"""PackedTokens of one process, for tests of what computes on them: one sequence whose tokens are
all trained on."""

from __future__ import annotations

import torch

from milescli.train.packed_tokens import PackedTokens, Places


def one_sequence(
    logprobs: torch.Tensor,
    *,
    streams: dict[str, torch.Tensor] | None = None,
    entropy: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> PackedTokens:
    """`logprobs` [S]; its loss is the mean over tokens."""
    count = len(logprobs)
    mask = torch.ones(count, dtype=torch.bool) if mask is None else mask
    return PackedTokens(
        places=Places(
            sequence=torch.zeros(count, dtype=torch.int64),
            offset=torch.arange(1, count + 1),
            lengths=torch.tensor([count + 1]),
        ),
        loss_mask=mask,
        loss_weights=mask / mask.sum(),
        streams=streams or {},
        logprobs=logprobs,
        entropy=torch.zeros(count) if entropy is None else entropy,
    )
