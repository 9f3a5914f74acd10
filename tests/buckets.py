"""Cuts named tensors into buckets, as trainer ranks send them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from milescli.weights.base import Bucket


def into_buckets(tensors: Iterable[tuple[str, torch.Tensor]], bound_bytes: int) -> Iterator[Bucket]:
    """Buckets of at most `bound_bytes`, in the order of `tensors`; a larger tensor is a bucket of
    its own."""
    bucket: Bucket = []
    for name, tensor in tensors:
        if bucket and sum(held.nbytes for _, held in bucket) + tensor.nbytes > bound_bytes:
            yield bucket
            bucket = []
        bucket.append((name, tensor))
    if bucket:
        yield bucket
