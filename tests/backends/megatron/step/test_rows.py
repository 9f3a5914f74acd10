"""Rows: how sequences are laid end to end and cut for context parallelism. Plain arrays; no
Megatron."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from milescli.backends.megatron.step.rows import RowShape, make_row, share_prefixes, zigzag


def _spans(lengths: list[int]) -> list[tuple[int, int]]:
    """Sequences of so many positions, end to end in a shard, where each has one token more."""
    starts = np.cumsum([0, *(length + 1 for length in lengths)])
    return [(int(start), length) for start, length in zip(starts, lengths, strict=False)]


lengths = st.lists(st.integers(0, 20), min_size=0, max_size=8)


@given(lengths, st.integers(1, 3), st.integers(1, 4))
def test_the_ranks_of_a_row_hold_every_position_once_in_equal_parts(
    rows: list[int], cp: int, multiple: int
) -> None:
    spans = _spans(rows)
    parts = [
        make_row(spans, shape=RowShape(cp=cp, cp_rank=rank, tail_multiple=multiple))
        for rank in range(cp)
    ]
    assert len({len(part.source) for part in parts}) == 1
    assert all(len(part.source) % multiple == 0 and len(part.source) for part in parts)
    held = torch.cat([part.source for part in parts])
    positions = [start + offset for start, length in spans for offset in range(length)]
    assert sorted(held[held >= 0].tolist()) == positions
    assert all(part.num_real == sum(rows) for part in parts)


@given(lengths, st.integers(1, 3))
def test_every_position_knows_its_sequence_and_its_place_there(rows: list[int], cp: int) -> None:
    spans = _spans(rows)
    for rank in range(cp):
        row = make_row(spans, shape=RowShape(cp=cp, cp_rank=rank))
        for source, sequence, place in zip(
            row.source.tolist(), row.sequence.tolist(), row.positions.tolist(), strict=True
        ):
            if source < 0:
                assert sequence == len(rows)
            else:
                start, length = spans[sequence]
                assert source == start + place and place < length


def test_without_context_parallelism_nothing_is_padded() -> None:
    spans = _spans([3, 5, 2])
    row = make_row([spans[2], spans[0]], shape=RowShape())
    assert row.source.tolist() == [10, 11, 0, 1, 2]
    assert row.sequence.tolist() == [0, 0, 1, 1, 1]
    assert row.cu_seqlens_padded == [0, 2, 5]


def test_each_rank_takes_a_piece_from_both_ends() -> None:
    assert zigzag([8], cp=2, cp_rank=0).tolist() == [0, 1, 6, 7]
    assert zigzag([8], cp=2, cp_rank=1).tolist() == [2, 3, 4, 5]
    assert zigzag([4, 8], cp=2, cp_rank=0).tolist() == [0, 3, 4, 5, 10, 11]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 8), st.integers(0, 5)), max_size=8))
def test_a_shared_position_stands_for_the_same_token_of_every_sequence(
    drawn: list[tuple[int, int, int]],
) -> None:
    """Of each sequence: which prompt it has, how much of it may be shared, and how much follows."""
    prefixes = [np.arange(length) + 100 * which for which, length, _ in drawn]
    rows = [length + more for _, length, more in drawn]
    whole = make_row(_spans(rows), shape=RowShape())
    row = share_prefixes(whole, prefixes)
    if row is whole:
        return
    assert row.shared is not None and row.skips is not None
    assert len(row.source) < 0.9 * len(whole.source)
    tokens = [*(prefixes[i].tolist() + [None] * drawn[i][2] for i in range(len(drawn)))]
    flat = [(token, place) for own in tokens for place, token in enumerate(own)]
    for here, (token, place) in zip(row.shared.tolist(), flat, strict=True):
        number, start = int(row.sequence[here]), int(row.positions[here])
        assert start == place
        assert token is None or tokens[number][place] == token
    own = [number for number, length in enumerate(rows) if length]
    for number, skip in zip(own, row.skips.tolist(), strict=True):
        there = row.positions[row.sequence == number].tolist()
        assert there == list(range(skip, rows[number])), "what is left of it is its end"
        assert skip in (0, len(prefixes[number]))
