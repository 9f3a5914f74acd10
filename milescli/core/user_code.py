"""What a function of the user's raised, as an error shows it. Used wherever plug-ins are called."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import threading
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
BOUND_S = 120.0
"""On one plain call in the driver: a filter, an estimator of advantages, ..."""
GRACE_S = 10.0
"""For C code to come back to Python."""


def user_traceback(error: BaseException) -> str:
    """The frames from the user's first one on, and the error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = list(dropwhile(lambda frame: frame.filename.startswith(_OURS), frames))
    last = "".join(traceback.format_exception_only(error)).strip()
    if not own:
        return last
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(own), last])


class _Expired(BaseException):
    """Raised in the user's code by an alarm, where an `except Exception` of his does not catch
    it."""


@contextlib.contextmanager
def bounded(what: str) -> Iterator[None]:
    """Around a plain call of the user's code, no `await` within: what has not returned after
    `BOUND_S` is interrupted, and becomes a RecipeError with the place where it was. C code that
    cannot be (a regular expression) ends the process `GRACE_S` later, after it has said where that
    was. Only in the main thread, where an event loop would stand still; others have bounds of their
    own."""
    if threading.current_thread() is not threading.main_thread() or _alarm_is_set():
        yield
        return

    def expire(*_: object) -> None:
        raise _Expired

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, BOUND_S)
    faulthandler.dump_traceback_later(BOUND_S + GRACE_S, exit=True)
    try:
        yield
    except _Expired as error:
        raise RecipeError(
            f"{what} did not return within {BOUND_S:g} s",
            why=user_traceback(error),
            fix="mend it, then start or resume the run",
        ) from None
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def _alarm_is_set() -> bool:
    return signal.getitimer(signal.ITIMER_REAL)[0] > 0.0


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
