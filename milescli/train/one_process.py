"""Sequences as PackedTokens on one process, without a trainer: for contracts of plug-ins, and for
tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from milescli.train.base import TrainSequence
from milescli.train.packed_tokens import PackedTokens, Places


def packed(
    sequences: Sequence[TrainSequence], *, extra: Mapping[str, torch.Tensor] | None = None
) -> PackedTokens:
    """All tokens of a step, sequences end to end, as `Objective.complete` sees them. `extra`:
    streams that ranks compute, [S]."""
    lengths = [len(sequence.token_ids) for sequence in sequences]
    divisor = sum(sequence.share for sequence in sequences if sequence.loss_mask.any())

    def joined(part: Callable[[TrainSequence], np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([part(sequence)[1:] for sequence in sequences]))

    mask = joined(lambda sequence: sequence.loss_mask)
    weights = joined(
        lambda sequence: np.full(
            len(sequence.token_ids), sequence.token_weight / (divisor or 1.0), np.float32
        )
    )
    streams = {
        name: joined(lambda sequence, name=name: sequence.streams[name])
        for name in sequences[0].streams
    }
    return PackedTokens(
        places=Places(
            sequence=torch.tensor([i for i, n in enumerate(lengths) for _ in range(n - 1)]),
            offset=torch.tensor([place for n in lengths for place in range(1, n)]),
            lengths=torch.tensor(lengths),
        ),
        loss_mask=mask,
        loss_weights=torch.where(mask, weights, 0.0),
        streams={**streams, **(extra or {})},
    )


def as_microbatch(
    tokens: PackedTokens,
    logprobs: torch.Tensor,
    *,
    only: Sequence[int] | None = None,
    are_scores: bool = False,
    candidates: torch.Tensor | None = None,
) -> PackedTokens:
    """The same tokens as a loss sees them, after `complete`; `only`: of these sequences. `logprobs`
    [S], of all tokens; or scores. `candidates` [S, k]: log-probs of those."""
    chosen = range(tokens.num_sequences) if only is None else only
    at = torch.isin(tokens.places.sequence, torch.tensor(list(chosen)))
    number = torch.full((tokens.num_sequences,), -1)
    number[torch.tensor(list(chosen))] = torch.arange(len(chosen))
    own = logprobs[at]
    return replace(
        tokens,
        places=replace(
            tokens.places,
            sequence=number[tokens.places.sequence[at]],
            offset=tokens.places.offset[at],
            lengths=tokens.places.lengths[torch.tensor(list(chosen))],
        ),
        loss_mask=tokens.loss_mask[at],
        loss_weights=tokens.loss_weights[at],
        streams={
            name: values[at] for name, values in {**tokens.streams, **tokens.new_streams}.items()
        },
        new_streams={},
        logprobs=None if are_scores else own,
        entropy=None if are_scores else 0.1 * own.square(),
        scores=own if are_scores else None,
        candidates=None if candidates is None else candidates[at],
    )
