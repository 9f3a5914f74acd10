"""Defines the contract of a weight channel from trainer to engines. Runs inside trainer ranks;
knows no vendor."""

from __future__ import annotations

from collections.abc import Iterator
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
            f"`{channel.__name__}` is no weight channel",
            why=f"it has no {', '.join(lacking)}",
            fix="give it what milescli.weights.base.WeightChannel has",
        )
