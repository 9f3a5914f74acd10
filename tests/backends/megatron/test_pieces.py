"""Ranges of flat memory as boxes of the tensors that a checkpoint stores."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from milescli.backends.megatron.pieces import boxes, pieces


@given(st.data())
def test_boxes_are_the_range_in_order_and_none_is_larger_than_asked(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    end = data.draw(st.integers(start, count))
    limit = data.draw(st.integers(1, count))
    numbers = torch.arange(count).view(shape)
    found = []
    for offsets, sizes in boxes(shape, start, end, limit=limit):
        box = numbers[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
        assert box.numel() <= limit
        found += box.flatten().tolist()
    assert found == list(range(start, end))


def test_the_halves_of_a_fused_projection_go_where_megatron_stores_them() -> None:
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    # [gate; up] of the second of two tensor-parallel ranks, the third layer of four
    local = torch.arange(6 * 5, dtype=torch.float32).view(6, 5)
    whole = ShardedTensor.from_rank_offsets(
        "fc1", local, (0, 2, 4), (1, 1, 2), replica_id=(0, 0, 1), prepend_axis_num=1
    )
    fused = apply_swiglu_sharded_factory(whole, [(0, 2, 4)])
    out = torch.full((4, 12, 5), -1.0)
    for start, end in ((0, 7), (7, 22), (22, 30)):
        for piece in pieces(fused, local.view(-1)[start:end], start=start, prefixes=["state."]):
            assert piece.key == "state.fc1" and piece.replica_id == (0, 0, 0)
            assert piece.data.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
            out[piece.global_slice()] = piece.data
    assert torch.equal(out[2, 3:6], local[:3]) and torch.equal(out[2, 9:], local[3:])
    assert int((out == -1).sum()) == out.numel() - local.numel()
