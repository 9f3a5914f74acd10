"""Sequences -> TrainBatch: spread over optimizer updates, data-parallel ranks and microbatches, and
laid end to end for each rank. Pure and deterministic; arrays only."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from milescli.train.base import TrainBatch, TrainSequence, TrainShard
from milescli.train.binning import share_out
from milescli.train.streams import Stream

Update = list[list[list[int]]]
"""[dp][microbatches] sequence numbers"""


def pack(
    sequences: Sequence[TrainSequence],
    *,
    objective: str,
    dp: int,
    max_tokens_per_microbatch: int,
    updates: int = 1,
    temperature: float = 1.0,
    asked: Collection[int] = (),
) -> TrainBatch:
    """Every sequence once. `objective`: the name that ranks load it by; `updates`: how many
    optimizer updates share the groups out, fewer where there are fewer groups; `asked`: sequences
    whose log-probs a step tells."""
    assert sequences, "a step needs at least one sequence"
    parts = [
        _spread(members, sequences, dp=dp, cap=max_tokens_per_microbatch)
        for members in _split_by_group(sequences, updates)
    ]
    weights = _loss_weights(sequences, parts)
    shards = [
        _shard(
            sequences,
            [update[rank] for update in parts],
            dp_rank=rank,
            weights=weights,
            objective=objective,
            temperature=temperature,
            asked=asked,
        )
        for rank in range(dp)
    ]
    return TrainBatch(shards=shards)


def _split_by_group(sequences: Sequence[TrainSequence], updates: int) -> list[list[int]]:
    """Sequence numbers of each update: neighbouring groups, as equally many as can be."""
    groups: dict[int, list[int]] = {}
    for number, sequence in enumerate(sequences):
        groups.setdefault(sequence.group, []).append(number)
    parts = np.array_split(np.array(list(groups)), min(updates, len(groups)))
    return [[number for group in part.tolist() for number in groups[group]] for part in parts]


def _loss_weights(sequences: Sequence[TrainSequence], updates: Sequence[Update]) -> np.ndarray:
    """[sequences] float32 as `TrainShard.loss_weights` says. Sequences without a trained token do
    not count."""
    weights = np.zeros(len(sequences), np.float32)
    for update in updates:
        members = [number for rank in update for microbatch in rank for number in microbatch]
        trained = [number for number in members if sequences[number].loss_mask.any()]
        divisor = sum(sequences[number].share for number in trained)
        for number in trained:
            weights[number] = sequences[number].token_weight / divisor
    return weights


def _shard(
    sequences: Sequence[TrainSequence],
    updates: Sequence[Sequence[Sequence[int]]],
    *,
    dp_rank: int,
    weights: np.ndarray,
    objective: str,
    temperature: float,
    asked: Collection[int],
) -> TrainShard:
    """`updates`: [updates][microbatches] sequence numbers of this rank."""
    numbers = [number for update in updates for microbatch in update for number in microbatch]
    own = [sequences[number] for number in numbers]
    local = {number: index for index, number in enumerate(numbers)}
    return TrainShard(
        objective=objective,
        temperature=temperature,
        dp_rank=dp_rank,
        sequence_ids=np.array(numbers, np.int64),
        num_sequences=len(sequences),
        cu_seqlens=np.cumsum([0, *(len(sequence.token_ids) for sequence in own)]),
        token_ids=_joined([sequence.token_ids for sequence in own], np.int32),
        loss_mask=_joined([sequence.loss_mask for sequence in own], np.bool_),
        loss_weights=weights[numbers],
        streams={
            stream: _joined(
                [sequence.streams[stream] for sequence in own],
                np.int32 if stream == Stream.CANDIDATES else np.float32,
                width=first.shape[1:],
            )
            for stream, first in sequences[0].streams.items()
        },
        updates=[
            [[local[number] for number in microbatch] for microbatch in update]
            for update in updates
        ],
        routed_experts=_routing(own),
        asked=tuple(local[number] for number in numbers if number in asked),
    )


def _joined(
    parts: list[np.ndarray], dtype: type[np.generic], *, width: tuple[int, ...] = ()
) -> np.ndarray:
    return np.concatenate(parts, dtype=dtype) if parts else np.zeros((0, *width), dtype)


def _routing(sequences: Sequence[TrainSequence]) -> np.ndarray | None:
    """[T, num_layers, topk] of the smallest type; each sequence gets a row of zeros at its end."""
    parts = []
    for sequence in sequences:
        if sequence.routed_experts is None:
            return None
        rows = sequence.routed_experts
        assert len(rows) == len(sequence.token_ids) - 1, (len(rows), len(sequence.token_ids))
        parts += [rows, np.zeros((1, *rows.shape[1:]), rows.dtype)]
    if not parts:
        return None
    largest = max(int(part.max(initial=0)) for part in parts)
    narrow = next(t for t in (np.uint8, np.uint16) if largest <= np.iinfo(t).max)
    return np.concatenate(parts, dtype=narrow, casting="unsafe")


def _spread(
    members: Sequence[int], sequences: Sequence[TrainSequence], *, dp: int, cap: int
) -> Update:
    """Units of the members over ranks and microbatches, by their positions."""
    units: dict[object, list[int]] = {}
    for number in members:
        unit = sequences[number].unit
        units.setdefault(("alone", number) if unit is None else unit, []).append(number)
    parts = list(units.values())
    lengths = [sum(len(sequences[number].token_ids) - 1 for number in part) for part in parts]
    return [
        [sorted(number for index in bin_ for number in parts[index]) for bin_ in bins]
        for bins in share_out(lengths, num_ranks=dp, cap=cap)
    ]
