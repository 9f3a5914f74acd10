"""PackedTokens of one process, for tests of what computes on them: one sequence whose tokens are
all trained on."""

from __future__ import annotations

import numpy as np
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


def ragged(rng: np.random.Generator, *, with_logprobs: bool = False) -> PackedTokens:
    """A few sequences of unequal lengths, half of whose tokens are trained on, and padding. With
    log-probs a microbatch of a loss, without them all tokens of a step."""
    lengths = rng.integers(2, 12, size=rng.integers(1, 5)).tolist()
    sequence = [number for number, length in enumerate(lengths) for _ in range(length - 1)]
    offset = [place for length in lengths for place in range(1, length)]
    padding = int(rng.integers(0, 4))
    count = len(sequence)
    mask = torch.from_numpy(np.append(rng.random(count) < 0.5, [False] * padding).astype(bool))
    logprobs = torch.from_numpy(-rng.gamma(1.0, 1.0, size=count + padding).astype(np.float32))
    return PackedTokens(
        places=Places(
            sequence=torch.tensor([*sequence, *[len(lengths)] * padding]),
            offset=torch.tensor([*offset, *[0] * padding]),
            lengths=torch.tensor(lengths),
        ),
        loss_mask=mask,
        loss_weights=mask / mask.sum().clamp(min=1),
        streams={},
        logprobs=logprobs.requires_grad_() if with_logprobs else None,
        entropy=torch.zeros(count + padding) if with_logprobs else None,
    )
