"""Cuts a stream of named tensors into buckets of bounded size, and lays a bucket out as one flat
run of bytes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from milescli.weights.base import Bucket


def into_buckets(tensors: Iterable[tuple[str, torch.Tensor]], bound_bytes: int) -> Iterator[Bucket]:
    """Buckets of at most `bound_bytes`, in the order of `tensors`; a tensor that is larger is a
    bucket of its own. Lazy: holds no more than one bucket. No bucket is empty."""
    assert bound_bytes > 0, bound_bytes
    bucket: Bucket = []
    held_bytes = 0
    for name, tensor in tensors:
        if bucket and held_bytes + tensor.nbytes > bound_bytes:
            yield bucket
            bucket, held_bytes = [], 0
        bucket.append((name, tensor))
        held_bytes += tensor.nbytes
    if bucket:
        yield bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Where one tensor lies in a flat bucket."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    """First byte."""
    end: int
    """One past the last byte."""


def layout(bucket: Bucket) -> list[Slice]:
    """The tensors one after the other, without gaps."""
    slices: list[Slice] = []
    start = 0
    for name, tensor in bucket:
        end = start + tensor.nbytes
        slices.append(
            Slice(name=name, shape=tensor.shape, dtype=tensor.dtype, start=start, end=end)
        )
        start = end
    return slices


def write_flat(bucket: Bucket, flat: torch.Tensor) -> None:
    """Copy a bucket into `flat` ([bytes] uint8, at least as long), in the order of `layout`."""
    for (_, tensor), place in zip(bucket, layout(bucket), strict=True):
        flat[place.start : place.end].copy_(
            tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        )
