"""Checks that a user's piece returns one value per position."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milescli.core.errors import RecipeError
from milescli.core.user_code import mend, name_of

if TYPE_CHECKING:
    import torch


def require_each(
    piece: object, values: torch.Tensor | None, made: object, *, kind: str, of: str, count: int
) -> None:
    """Require `count` numbers in `values`, one per position; None means that `made`, the result of
    the piece, has the wrong type. Raises RecipeError; `of` says what the values are, such as "a
    loss"."""
    if values is not None and values.shape == (count,):
        return
    gave = f"a {type(made).__name__}" if values is None else f"{of} of shape {list(values.shape)}"
    raise RecipeError(
        f"the {kind} `{name_of(piece)}` gave {gave}",
        why=f"there are {count} positions, and each has one",
        fix=mend(piece, f"docs/extending.md says what a {kind} gives"),
    )
