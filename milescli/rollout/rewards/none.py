"""The reward `none`: for runs that learn from a teacher alone."""

from __future__ import annotations


def none(*, prompt: str, response: str, label: str | None) -> float:
    """0.0, whatever the response: nobody scores it (`train.distill.reward_weight: 0`)."""
    return 0.0
