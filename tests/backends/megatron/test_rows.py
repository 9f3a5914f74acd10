"""Rows: how sequences are laid end to end and cut for context parallelism. Plain arrays; no
Megatron."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from milescli.backends.megatron.rows import RowShape, make_row, take, zigzag
from milescli.train import packing
from milescli.train.base import TrainBatch


def _batch(lengths: list[int]) -> TrainBatch:
    pairs = [([1], list(range(2, 2 + length))) for length in lengths]
    return packing.pack_supervised(pairs, dp=1, max_tokens_per_microbatch=10_000)


lengths = st.lists(st.integers(1, 20), min_size=0, max_size=8)


@given(lengths, st.integers(1, 3), st.integers(1, 4))
def test_the_ranks_of_a_row_hold_every_position_once_in_equal_parts(
    rows: list[int], cp: int, multiple: int
) -> None:
    batch = _batch([*rows, 5])
    indices = list(range(len(rows)))
    parts = [
        make_row(batch, indices, shape=RowShape(cp=cp, cp_rank=rank, tail_multiple=multiple))
        for rank in range(cp)
    ]
    assert len({len(part.source) for part in parts}) == 1
    assert all(len(part.source) % multiple == 0 and len(part.source) for part in parts)
    held = torch.cat([part.source for part in parts])
    assert sorted(held[held >= 0].tolist()) == list(range(batch.cu_seqlens[len(rows)]))
    assert all(part.num_real == batch.cu_seqlens[len(rows)] for part in parts)


@given(lengths, st.integers(1, 3))
def test_positions_count_from_the_start_of_each_sequence(rows: list[int], cp: int) -> None:
    batch = _batch([*rows, 5])
    starts = np.repeat(batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens))
    for rank in range(cp):
        row = make_row(batch, list(range(len(rows))), shape=RowShape(cp=cp, cp_rank=rank))
        real = row.source >= 0
        assert torch.equal(
            row.positions[real], row.source[real] - torch.from_numpy(starts)[row.source[real]]
        )


def test_without_context_parallelism_nothing_is_padded() -> None:
    row = make_row(_batch([3, 5, 2]), [2, 0], shape=RowShape())
    assert row.source.tolist() == [8, 9, 0, 1, 2]
    assert row.cu_seqlens_padded == [0, 2, 5]


def test_each_rank_takes_a_piece_from_both_ends() -> None:
    assert zigzag([8], cp=2, cp_rank=0).tolist() == [0, 1, 6, 7]
    assert zigzag([8], cp=2, cp_rank=1).tolist() == [2, 3, 4, 5]
    assert zigzag([4, 8], cp=2, cp_rank=0).tolist() == [0, 3, 4, 5, 10, 11]


def test_padding_takes_the_fill() -> None:
    assert take(torch.tensor([10, 20, 30]), torch.tensor([2, -1, 0]), fill=7).tolist() == [
        30,
        7,
        10,
    ]
