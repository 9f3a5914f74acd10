"""Trainer -> engines: the contract of a weight channel. Runs inside trainer ranks; knows no
vendor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from milescli.core.types import WeightVersion

Bucket = list[tuple[str, torch.Tensor]]
"""Complete tensors under their Hugging Face names, together at most `weights.bucket_mib`; on the
trainer's device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """One rollout engine, as a trainer rank reaches it."""

    url: str
    """http://127.0.0.1:30000"""
    tp: int
    """Engine ranks that hold shards of the weights."""
    sharing_ranks: list[int]
    """[tp] trainer rank whose memory each engine rank can open, as `sharing.py` finds it; empty
    where there is none, and weights come through a group."""
    api_key: str | None = field(default=None, repr=False)
    """What requests must bear."""


class WeightChannel(Protocol):
    """One way of sending. Every trainer rank holds one and calls every method together with the
    others (collective)."""

    def open(self, engines: list[EngineAddress]) -> None:
        """Connect; called once, and again after an engine was replaced."""

    def send(self, buckets: Iterator[Bucket], version: WeightVersion) -> None:
        """Consume all buckets (each rank is given the same ones) and make every engine hold them as
        `version`. Returns when the engines have taken them. Raises WaitTimeout or WorkerDied with
        the engine's name."""

    def verify(self, buckets: Iterator[Bucket]) -> None:
        """Compare what the engines hold with these tensors, bit for bit. Raises MismatchError that
        names the first weight that differs."""

    def close(self) -> None:
        """Give groups and shared memory back."""
