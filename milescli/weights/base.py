"""Trainer -> engines: the contract of a weight channel. Runs inside trainer ranks; knows no
vendor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from milescli.core.types import EngineAddress

Bucket = list[tuple[str, torch.Tensor]]
"""Complete tensors under their Hugging Face names, together at most `weights.bucket_mib`; on the
trainer's device."""


class WeightChannel(Protocol):
    """One way of sending. Every trainer rank holds one and calls every method together with the
    others (collective)."""

    def open(self, engines: list[EngineAddress]) -> None:
        """Connect; called once, and again after an engine was replaced."""

    def send(self, buckets: Iterator[Bucket]) -> None:
        """Consume all buckets (each rank is given the same ones) and make every engine hold them.
        Returns when the engines have taken them; the caller has paused them, and tells them
        afterwards which version that was. Raises WaitTimeout or WorkerDied with the engine's
        name."""

    def verify(self, buckets: Iterator[Bucket]) -> None:
        """Compare what the engines hold with these tensors, bit for bit. Raises MismatchError that
        names the first weight that differs."""

    def close(self) -> None:
        """Give groups and shared memory back."""


class DraftChannel(WeightChannel, Protocol):
    """One that reaches the draft models of engines, too."""

    def send_draft(self, buckets: Iterator[Bucket]) -> None:
        """As `send`, for the draft model that guesses in every engine."""
