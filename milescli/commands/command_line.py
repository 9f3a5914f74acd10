"""The command line as the user typed it, for errors that name a command to go on with. Written down
at the single door, read by verbs."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

_TYPED: ContextVar[tuple[str, ...]] = ContextVar("typed", default=())
_IS_PROGRAM: ContextVar[bool] = ContextVar("is_program", default=False)


def remember(argv: Sequence[str], *, is_program: bool = False) -> None:
    """Everything behind `miles`. `is_program`: this process has nothing else to do."""
    _TYPED.set(tuple(argv))
    _IS_PROGRAM.set(is_program)


def is_program() -> bool:
    """Whether this process may fork, and end with the command line."""
    return _IS_PROGRAM.get()


def typed() -> list[str]:
    """Every word of it, `miles` first."""
    return ["miles", *_TYPED.get()]
