"""Laying out a bucket as one run of bytes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from milescli.weights.buckets import layout, write_flat

tensors = st.lists(
    st.tuples(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
        st.lists(st.integers(1, 5), min_size=1, max_size=3),
    ),
    max_size=12,
)


def named(specs) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"w{index}", torch.randn(*shape).to(dtype)) for index, (dtype, shape) in enumerate(specs)
    ]


@given(tensors.filter(bool))
def test_a_flat_bucket_gives_back_every_tensor_bit_for_bit(specs):
    bucket = named(specs)
    slices = layout(bucket)
    flat = torch.zeros(slices[-1].end + 3, dtype=torch.uint8)
    write_flat(bucket, flat)
    for (name, tensor), place in zip(bucket, slices, strict=True):
        # clone: a view of another dtype wants an aligned start, as a copy of its own has
        back = flat[place.start : place.end].clone().view(place.dtype).reshape(place.shape)
        assert (place.name, back.dtype) == (name, tensor.dtype)
        assert torch.equal(back, tensor)


def test_a_tensor_that_is_not_contiguous_is_laid_out_in_its_logical_order():
    tensor = torch.arange(12.0).reshape(3, 4).T
    flat = torch.zeros(tensor.nbytes, dtype=torch.uint8)
    write_flat([("w", tensor)], flat)
    assert torch.equal(flat.view(torch.float32).reshape(4, 3), tensor)
