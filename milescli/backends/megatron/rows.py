"""One microbatch as the model sees it: sequences laid end to end in one row, cut for context
parallelism. Made by the trainer rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from milescli.train.base import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """What the layout asks of a row."""

    cp: int = 1
    cp_rank: int = 0
    tail_multiple: int = 1
    """This rank's part of the row is padded at its end to a multiple of this (tp with sequence
    parallelism)."""

    @property
    def sequence_multiple(self) -> int:
        """Every sequence is padded to a multiple of this, so that context parallelism can cut it
        into equal pieces."""
        return 2 * self.cp if self.cp > 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """S: this rank's positions, padding included; F: positions of the whole row, F = S * cp."""

    source: torch.Tensor
    """[S] int64 position in the TrainBatch, -1 for padding."""
    positions: torch.Tensor
    """[S] int64 place in the sequence, for the rotary embedding; goes on counting through
    padding."""
    cu_seqlens: list[int]
    """[sequences + 1] of real positions, whole row."""
    cu_seqlens_padded: list[int]
    """[sequences + 1] of the same with padding, whole row. A tail of padding is a sequence of its
    own."""
    num_real: int
    """Real positions of the whole row."""


def make_row(batch: TrainBatch, indices: Sequence[int], *, shape: RowShape) -> Row:
    """The sequences `indices` of the batch, in that order. An empty list gives a row of padding
    alone."""
    starts = [batch.cu_seqlens[index] for index in indices]
    lengths = [batch.cu_seqlens[index + 1] - batch.cu_seqlens[index] for index in indices]
    kept = [(start, length) for start, length in zip(starts, lengths, strict=True) if length]
    multiple = shape.sequence_multiple
    padded = [-(-length // multiple) * multiple for _, length in kept]
    tail_multiple = shape.tail_multiple * (shape.cp if shape.cp > 1 else 1)
    # a multiple of both, so that every rank's part of the tail is even
    tail_multiple = int(np.lcm(tail_multiple, multiple))
    tail = -sum(padded) % tail_multiple or (tail_multiple if not kept else 0)
    if tail:
        padded.append(tail)
    lengths_real = [length for _, length in kept] + ([0] if tail else [])
    row_starts = np.concatenate([[0], np.cumsum(padded)])
    place = _counting(padded)
    which = np.repeat(np.arange(len(padded)), padded)
    real = place < np.array(lengths_real)[which]
    batch_starts = np.array([start for start, _ in kept] + ([0] if tail else []))
    source = np.where(real, batch_starts[which] + place, -1)
    mine = zigzag(padded, cp=shape.cp, cp_rank=shape.cp_rank)
    return Row(
        source=torch.from_numpy(source[mine]),
        positions=torch.from_numpy(place[mine]),
        cu_seqlens=[0, *np.cumsum(lengths_real).tolist()],
        cu_seqlens_padded=row_starts.tolist(),
        num_real=int(real.sum()),
    )


def zigzag(padded: Sequence[int], *, cp: int, cp_rank: int) -> np.ndarray:
    """Positions of the whole row that rank `cp_rank` holds: of every sequence, cut into 2 cp
    pieces, pieces cp_rank and 2 cp - 1 - cp_rank, so that causal attention costs every rank the
    same."""
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
    """[3, 2] -> 0 1 2 0 1."""
    lengths = np.asarray(lengths, dtype=np.int64)
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def take(values: torch.Tensor, source: torch.Tensor, *, fill: float | int | bool) -> torch.Tensor:
    """values[source] where there is a source, `fill` at padding; [S, ...] on the host."""
    padding = source < 0
    taken = values[source.clamp(min=0)]
    if bool(padding.any()):
        taken[padding] = fill
    return taken
