"""Formats exceptions in users' functions for errors. Used wherever plug-ins are called."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from milescli.core.errors import MilesError, RecipeError

_CALLER_FILES = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{Path(asyncio.__file__).parent}{os.sep}",
    contextlib.__file__,
)
"""Files of miles that call the user's code, left out of tracebacks: their frames do not help to fix
it."""
BOUND_S = 120.0
"""Bound on one call of a piece: a filter, an advantage estimator, a surrogate, ..."""
IMPORT_BOUND_S = 600.0
"""Bound on the import of a module, which may read much from a slow disk."""
GRACE_S = 5.0
"""Time for C code to return to Python; after that all threads are dumped."""
_SHOWN_FRAMES = 4
_is_bounded = False
in_user_process = False
"""True if this process only runs a user's code."""


def user_traceback(error: BaseException) -> str:
    """Return the frames from the user's first one on, and the error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = list(dropwhile(lambda frame: frame.filename.startswith(_CALLER_FILES), frames))
    last = "".join(traceback.format_exception_only(error)).strip()
    if not own:
        return last
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(own), last])


def name_of(plugin: object) -> str:
    """Return the name of a function or callable object in errors."""
    return getattr(plugin, "__name__", type(plugin).__name__)


def path_of(plugin: object) -> str:
    """Return the import path by which a recipe would name it, if it is a function or class of a
    module."""
    module, name = getattr(plugin, "__module__", None), getattr(plugin, "__qualname__", None)
    return f"{module}:{name}" if module and name else name_of(plugin)


def plugin_fix(plugin: object, how: str = "") -> str:
    """Return the fix in an error about a plug-in, given itself or its import path: "fix
    `mine:strict` (/home/me/mine.py:12): ..."."""
    name = plugin if isinstance(plugin, str) else name_of(plugin)
    return f"fix `{name}`{source_location(plugin)}" + (f": {how}" if how else ", then continue")


def source_location(plugin: object) -> str:
    """Return ` (file:line)` of the plug-in's definition; empty if it cannot be found."""
    if isinstance(plugin, str):
        module, _, name = plugin.partition(":")
        plugin = getattr(sys.modules.get(module), name, None)
    plugin = vars(plugin).get("_plugin", plugin) if hasattr(plugin, "__dict__") else plugin
    if plugin is None:
        return ""
    is_plain = inspect.isroutine(plugin) or inspect.isclass(plugin)
    source: Any = plugin if is_plain else type(plugin)
    try:
        return f" ({inspect.getsourcefile(source)}:{inspect.getsourcelines(source)[1]})"
    except (OSError, TypeError):
        return ""


@contextlib.contextmanager
def bounded(what: str, bound_s: float | None = None) -> Iterator[None]:
    """Bound the time of user code in a process that must neither hang with it nor end without a
    message: a trainer's rank. If the code has not returned after `bound_s` (None: `BOUND_S`), the
    process reports where it was, and ends; if the code ends the process, that is reported. Nested
    calls share the outermost bound. In a process that only runs user code this does nothing: the
    process that started it bounds it."""
    global _is_bounded
    if _is_bounded or in_user_process:
        yield
        return
    leave, caller, process = os._exit, threading.get_ident(), os.getpid()
    bound_s = BOUND_S if bound_s is None else bound_s

    def end(why: str, frame: FrameType, status: int) -> NoReturn:
        lines = "".join(traceback.format_stack(frame)[-_SHOWN_FRAMES:])
        print(f"{what} {why}\n{lines}", file=sys.stderr, flush=True)
        leave(status)

    def exit_with_words(status: int) -> NoReturn:
        if os.getpid() != process:  # a child that it has forked
            leave(status)
        end(f"ended this process: os._exit({status})", sys._getframe(1), status)

    def expire() -> None:
        end(f"did not return within {bound_s:g} s", sys._current_frames()[caller], 1)

    _is_bounded, os._exit = True, exit_with_words
    alarm = threading.Timer(bound_s, expire)
    alarm.daemon = True
    alarm.start()
    # where nobody can be told, not even of the stack, the alarm alone bounds it
    with contextlib.suppress(OSError, ValueError, AttributeError):
        faulthandler.dump_traceback_later(bound_s + GRACE_S, exit=True)
    try:
        yield
    finally:
        alarm.cancel()
        faulthandler.cancel_dump_traceback_later()
        _is_bounded, os._exit = False, leave


@contextlib.contextmanager
def as_recipe_errors(what: str) -> Iterator[None]:
    """Turn exceptions in user code into a RecipeError with their traceback."""
    try:
        yield
    except MilesError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise RecipeError(
            f"{what} failed",
            why=user_traceback(error),
            fix="fix it, then start or resume the run",
        ) from error
