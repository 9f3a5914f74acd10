"""Laying out a bucket as one run of bytes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from milescli.weights.base import has_quantised, layout, write_flat

tensors = st.lists(
    st.tuples(
        st.sampled_from(
            [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.uint8]
        ),
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
    assert sorted(place.name for place in slices) == sorted(name for name, _ in bucket)
    tensors = dict(bucket)
    for place in slices:
        tensor = tensors[place.name]
        # without a copy: a view of another dtype wants an aligned start
        back = flat[place.start : place.end].view(place.dtype).reshape(place.shape)
        assert back.dtype == tensor.dtype
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_a_tensor_that_is_not_contiguous_is_laid_out_in_its_logical_order():
    tensor = torch.arange(12.0).reshape(3, 4).T
    flat = torch.zeros(tensor.nbytes, dtype=torch.uint8)
    write_flat([("w", tensor)], flat)
    assert torch.equal(flat.view(torch.float32).reshape(4, 3), tensor)


def test_values_that_other_tensors_scale_are_known_by_their_dtypes():
    plain = named([(torch.float32, [2]), (torch.bfloat16, [2])])
    assert not has_quantised(tensor.dtype for _, tensor in plain)
    for dtype in (torch.float8_e4m3fn, torch.uint8, torch.int32):
        assert has_quantised([torch.float32, dtype])
