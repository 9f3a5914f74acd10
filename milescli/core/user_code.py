"""What a function of the user's raised, as an error shows it. Used wherever plug-ins are called."""

from __future__ import annotations

import asyncio
import contextlib
import os
import traceback
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path

from milescli.core.errors import MilesError, RecipeError

_OURS = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{Path(asyncio.__file__).parent}{os.sep}",
    contextlib.__file__,
)
"""What calls the user's code: of no use to who mends it."""


def user_traceback(error: Exception) -> str:
    """The frames from the user's first one on, and the error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = list(dropwhile(lambda frame: frame.filename.startswith(_OURS), frames))
    last = "".join(traceback.format_exception_only(error)).strip()
    if not own:
        return last
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(own), last])


@contextlib.contextmanager
def failures_named(what: str) -> Iterator[None]:
    """Around code of the user's: what it raises becomes a RecipeError with its traceback."""
    try:
        yield
    except MilesError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise RecipeError(
            f"{what} failed",
            why=user_traceback(error),
            fix="mend it, then start or resume the run",
        ) from error
