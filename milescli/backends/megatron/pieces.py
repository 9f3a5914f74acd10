"""A rank's pieces of the tensors of a checkpoint. Megatron spreads the optimizer over data-parallel
ranks in ranges of flat memory, which end anywhere within a parameter; a checkpoint stores boxes of
whole tensors. Here a range becomes the boxes that cover it, which are views of that memory, so that
nothing is gathered or copied to save and load under any layout. Used by `checkpoint`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
)

PIECE_BYTES = 2**28
"""Of the largest piece: so much is held twice when one is read, or comes from a device."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes)"""


def boxes(shape: Sequence[int], start: int, end: int, *, limit: int) -> Iterator[Box]:
    """Boxes of a tensor that are its elements `start` to `end`, in the order in which these lie in
    contiguous memory; none has more than `limit` elements."""
    row = math.prod(shape[1:])
    while start < end:
        if not shape:
            yield (), ()
            return
        first, inside = divmod(start, row)
        if inside or end - start < row or row > limit:
            stop = min(end, (first + 1) * row)
            for offsets, sizes in boxes(shape[1:], inside, stop - first * row, limit=limit):
                yield (first, *offsets), (1, *sizes)
        else:
            rows = min((end - start) // row, limit // row)
            stop = start + rows * row
            yield (first, *(0 for _ in shape[1:])), (rows, *shape[1:])
        start = stop


def pieces(
    described: ShardedBase,
    values: torch.Tensor,
    *,
    start: int,
    prefixes: Sequence[str] = ("",),
    stored: Collection[str] = (),
) -> Iterator[ShardedTensor]:
    """What a rank saves, or loads in place, of one parameter or of an optimizer state of it.
    `described`: the parameter in Megatron's `sharded_state_dict`; `values` [n]: of its elements
    from `start` on, in flat memory; `prefixes`: of the key, the first that is in `stored`, else
    the last."""
    limit = PIECE_BYTES // values.element_size()
    for at, part in _parts(described):
        key = next((p + part.key for p in prefixes if p + part.key in stored), None)
        key = prefixes[-1] + part.key if key is None else key
        low = max(start, at) - at
        high = min(start + len(values), at + math.prod(part.local_shape)) - at
        ahead = part.prepend_axis_num
        for offsets, sizes in boxes(part.local_shape, low, high, limit=limit):
            begin, sizes = at + low - start, (*(1 for _ in range(ahead)), *sizes)
            low += math.prod(sizes)
            offsets = (*(0 for _ in range(ahead)), *offsets)
            yield replace(
                part,
                key=key,
                data=values[begin : begin + math.prod(sizes)].view(sizes),
                dtype=values.dtype,
                local_shape=sizes,
                global_offset=tuple(map(sum, zip(part.global_offset, offsets, strict=True))),
                axis_fragmentations=None,
                prepend_axis_num=0,
                # no two data-parallel ranks have the same range
                replica_id=(*part.replica_id[:2], 0),
            )


def _parts(described: ShardedBase) -> list[tuple[int, ShardedTensor]]:
    """(first element within the parameter, how it is stored) of each tensor that is stored of a
    parameter: two of a fused gate and up projection. They lie one after the other."""
    if isinstance(described, ShardedTensor):
        return [(0, described.without_data())]
    assert isinstance(described, ShardedTensorFactory), type(described)
    whole = torch.empty(described.data.shape, dtype=described.data.dtype, device="meta")
    built = nested_values([replace(described, data=whole).build()])
    parts = sorted(((part.data.storage_offset(), part) for part in built), key=lambda part: part[0])
    end = 0
    for at, part in parts:
        assert at == end and part.data.is_contiguous(), f"{part.key} is no run of {described.key}"
        end += part.data.numel()
    assert end == whole.numel(), f"{end} of {whole.numel()} numbers of {described.key} are stored"
    return [(at, part.without_data()) for at, part in parts]
