"""Lays a bucket of named tensors out as one flat run of bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from milescli.weights.base import Bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Locates one tensor in a flat bucket."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    """First byte."""
    end: int
    """One past the last byte."""


def layout(bucket: Bucket) -> list[Slice]:
    """Return the slices of the tensors, one after the other without gaps: SGLang computes the
    places by itself. Wide dtypes come first, so that each tensor begins at a multiple of its
    element's bytes, without which its bytes cannot be viewed as numbers."""
    slices: list[Slice] = []
    start = 0
    for name, tensor in _aligned(bucket):
        end = start + tensor.nbytes
        slices.append(
            Slice(name=name, shape=tensor.shape, dtype=tensor.dtype, start=start, end=end)
        )
        start = end
    return slices


def write_flat(bucket: Bucket, flat: torch.Tensor) -> None:
    """Copy a bucket into `flat` ([bytes] uint8, at least as long), in the order of `layout`."""
    for (_, tensor), place in zip(_aligned(bucket), layout(bucket), strict=True):
        flat[place.start : place.end].copy_(
            tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        )


def _aligned(bucket: Bucket) -> Bucket:
    return sorted(bucket, key=lambda pair: -pair[1].itemsize)


def has_quantised(bucket: Bucket) -> bool:
    """Return True if a tensor holds numbers that another one scales: float8, or packed integers."""
    return any(tensor.itemsize == 1 or not tensor.is_floating_point() for _, tensor in bucket)
