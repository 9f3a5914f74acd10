"""A reward that a random model already earns now and then, so that every step of a small test
changes the weights."""

from __future__ import annotations


def variety(*, prompt: str, response: str, label: str | None) -> float:
    """Share of different characters in the response."""
    return len(set(response)) / max(len(response), 1)
