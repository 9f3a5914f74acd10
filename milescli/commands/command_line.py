"""The command line as the user typed it, for errors that name a command to go on with. Written down
at the single door, read by verbs."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

_TYPED: ContextVar[tuple[str, ...]] = ContextVar("typed", default=())


def remember(argv: Sequence[str]) -> None:
    """Everything behind `miles`."""
    _TYPED.set(tuple(argv))


def typed() -> list[str]:
    """Every word of it, `miles` first."""
    return ["miles", *_TYPED.get()]
