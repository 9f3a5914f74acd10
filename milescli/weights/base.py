"""Defines the contract of a weight channel from trainer to engines. Runs inside trainer ranks;
knows no vendor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from milescli.core.errors import RecipeError
from milescli.core.types import EngineAddress

Bucket = list[tuple[str, torch.Tensor]]
"""Complete tensors under their Hugging Face names, together at most `weights.bucket_mib`; on the
trainer's device."""


class WeightChannel(Protocol):
    """Sends weights to engines in one way. Every trainer rank has one, and calls every method
    together with the others (collective)."""

    def open(self, engines: list[EngineAddress]) -> None:
        """Connect to the engines; called once, and again after an engine was replaced."""

    def send(self, buckets: Iterator[Bucket]) -> None:
        """Consume all buckets (every rank gets the same ones) and load them into every engine.
        Returns when the engines have them. The caller has paused the engines, and tells them the
        version afterwards. Raises WaitTimeout or WorkerDied with the engine's name."""

    def verify(self, buckets: Iterator[Bucket]) -> None:
        """Compare the engines' weights with these tensors bit for bit. Raises MismatchError that
        names the first weight that differs."""

    def close(self) -> None:
        """Release groups and shared memory."""


class DraftChannel(WeightChannel, Protocol):
    """Sends weights to the engines' draft models too."""

    def send_draft(self, buckets: Iterator[Bucket]) -> None:
        """Send like `send`, to the draft model of every engine."""


_METHODS = ("open", "send", "verify", "close")


def check_channel(channel: type) -> None:
    """Require the methods that ranks call. `weights.verify=true` shows that weights arrive. Raises
    RecipeError."""
    lacking = [name for name in _METHODS if not callable(getattr(channel, name, None))]
    if lacking:
        raise RecipeError(
            f"`{channel.__name__}` is not a weight channel",
            why=f"it has no {', '.join(lacking)}",
            fix="implement milescli.weights.base.WeightChannel",
        )


# --- buckets as bytes


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
    positions itself. Wide dtypes come first, so that each tensor begins at a multiple of its
    element's bytes, without which its bytes cannot be viewed as numbers."""
    slices: list[Slice] = []
    start = 0
    for name, tensor in aligned(bucket):
        end = start + tensor.nbytes
        slices.append(
            Slice(name=name, shape=tensor.shape, dtype=tensor.dtype, start=start, end=end)
        )
        start = end
    return slices


def write_flat(bucket: Bucket, flat: torch.Tensor) -> None:
    """Copy a bucket into `flat` ([bytes] uint8, at least as long), in the order of `layout`."""
    for (_, tensor), place in zip(aligned(bucket), layout(bucket), strict=True):
        flat[place.start : place.end].copy_(
            tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        )


def aligned(bucket: Bucket) -> Bucket:
    """Return the tensors in the order of `layout`."""
    return sorted(bucket, key=lambda pair: -pair[1].itemsize)


def has_quantised(dtypes: Iterable[torch.dtype]) -> bool:
    """Return True if a dtype needs scales: float8, or packed integers."""
    return any(dtype.itemsize == 1 or not dtype.is_floating_point for dtype in dtypes)
