"""Lays out one microbatch as the model sees it: sequences end to end in one row, cut for context
parallelism. Called by the trainer rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """Holds the layout's requirements on a row."""

    cp: int = 1
    cp_rank: int = 0
    tail_multiple: int = 1
    """This rank's part of the row is padded at its end to a multiple of this (tp with sequence
    parallelism)."""

    @property
    def sequence_multiple(self) -> int:
        """Return the multiple to which every sequence is padded, so that context parallelism can
        cut it into equal pieces."""
        return 2 * self.cp if self.cp > 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Locates the tokens of a packed row. S: this rank's positions, padding included; F: positions
    of the whole row, F = S * cp."""

    source: torch.Tensor
    """[S] int64 index of the input token in the shard, -1 for padding."""
    sequence: torch.Tensor
    """[S] int64 index of the position's span in the row; the number of spans at padding."""
    positions: torch.Tensor
    """[S] int64 place in the sequence, for the rotary embedding; continues through padding."""
    cu_seqlens: list[int]
    """[sequences + 1] cumulative numbers of real positions, whole row."""
    cu_seqlens_padded: list[int]
    """[sequences + 1] of the same with padding, whole row. A tail of padding is a sequence of its
    own."""
    num_real: int
    """Real positions of the whole row."""
    shared: torch.Tensor | None = None
    """[all positions of the sequences, end to end] int64 position of this row that is used for
    each, as sequences with a common beginning share their first positions; None: no positions are
    shared."""
    skips: torch.Tensor | None = None
    """[sequences] int32 number of positions at the beginning of each that are those of another
    sequence."""


def make_row(spans: Sequence[tuple[int, int]], *, shape: RowShape) -> RowLayout:
    """Lay out a row of `spans`: (index of the first token, number of positions) of each sequence,
    in order. Without spans the row consists of padding."""
    nonempty = [(number, start, length) for number, (start, length) in enumerate(spans) if length]
    multiple = shape.sequence_multiple
    padded = [-(-length // multiple) * multiple for _, _, length in nonempty]
    tail_multiple = shape.tail_multiple * (shape.cp if shape.cp > 1 else 1)
    # a multiple of both, so that every rank's part of the tail is even
    tail_multiple = int(np.lcm(tail_multiple, multiple))
    tail = -sum(padded) % tail_multiple or (tail_multiple if not nonempty else 0)
    if tail:
        padded.append(tail)
        nonempty.append((len(spans), 0, 0))
    numbers, starts, lengths = (np.array(column) for column in zip(*nonempty, strict=True))
    which = np.repeat(np.arange(len(padded)), padded)
    place = _counting(padded)
    real = place < lengths[which]
    mine = zigzag(padded, cp=shape.cp, cp_rank=shape.cp_rank)
    return RowLayout(
        source=torch.from_numpy(np.where(real, starts[which] + place, -1)[mine]),
        sequence=torch.from_numpy(np.where(real, numbers[which], len(spans))[mine]),
        positions=torch.from_numpy(place[mine]),
        cu_seqlens=[0, *np.cumsum(lengths).tolist()],
        cu_seqlens_padded=[0, *np.cumsum(padded).tolist()],
        num_real=int(real.sum()),
    )


MAX_REMAINING_SHARE = 0.9
"""Prefixes are shared only if at most this share of the row's positions remains."""


def share_prefixes(row: RowLayout, prefixes: Sequence[np.ndarray]) -> RowLayout:
    """Return the row with positions that several sequences have in common laid out once. `prefixes`
    [sequences]: token ids of the first positions of each that may be shared; the model's results
    there must depend on them alone. `row`: whole, without context parallelism and without a
    tail."""
    starts = np.searchsorted(row.sequence.numpy(), np.arange(len(prefixes)))
    stands_for, firsts = np.arange(len(row.source)), dict[bytes, int]()
    for start, prefix in zip(starts.tolist(), prefixes, strict=True):
        first = firsts.setdefault(prefix.tobytes(), start)
        stands_for[start : start + len(prefix)] = np.arange(first, first + len(prefix))
    is_kept = stands_for == np.arange(len(stands_for))
    if is_kept.sum() > MAX_REMAINING_SHARE * len(is_kept):
        return row
    kept = torch.from_numpy(np.flatnonzero(is_kept))
    left_out = np.add.reduceat(~is_kept, row.cu_seqlens[:-1], dtype=np.int32)
    return replace(
        row,
        source=row.source[kept],
        sequence=row.sequence[kept],
        positions=row.positions[kept],
        shared=torch.from_numpy((np.cumsum(is_kept) - 1)[stands_for]),
        skips=torch.from_numpy(left_out),
    )


def zigzag(padded: Sequence[int], *, cp: int, cp_rank: int) -> np.ndarray:
    """Return the positions of the whole row that rank `cp_rank` holds: pieces cp_rank and 2 cp - 1
    - cp_rank of every sequence, cut into 2 cp pieces, so that causal attention takes every rank
    equally long."""
    if cp == 1:
        return np.arange(sum(padded))
    starts = np.concatenate([[0], np.cumsum(padded)[:-1]])
    pieces = np.array(padded) // (2 * cp)
    first = starts + pieces * cp_rank
    second = starts + pieces * (2 * cp - 1 - cp_rank)
    begins = np.stack([first, second], axis=1).reshape(-1)
    lengths = np.repeat(pieces, 2)
    return np.repeat(begins, lengths) + _counting(lengths)


def _counting(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return consecutive numbers for each length: [3, 2] -> 0 1 2 0 1."""
    lengths = np.asarray(lengths, dtype=np.int64)
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
