"""What an error says when it is only the echo of another process that went away. The one list of
such words; asked by trainer ranks, weight channels and the groups of actors."""

from __future__ import annotations

_MARKS = (
    "closed by peer",
    "reset by peer",
    "connection closed",
    "connection reset",
    "broken pipe",
    "timed out",
    "timeout",
    "gloo",
    "nccl",
)
"""As gloo, NCCL and sockets put it, in lower case."""


def sounds_like_lost_peer(text: str) -> bool:
    """Whether an error with this text may be a symptom, so that its cause is to be looked for in
    another process."""
    lowered = text.lower()
    return any(mark in lowered for mark in _MARKS)
