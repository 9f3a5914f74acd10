"""What a function of the user's raised, as an error shows it. Used wherever plug-ins are called."""

from __future__ import annotations

import traceback
from collections.abc import Collection


def user_traceback(error: Exception, *, callers: Collection[str]) -> str:
    """The frames below ours, and the error. `callers`: files of ours, which the user need not
    see."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if frame.filename not in callers and "asyncio" not in frame.filename
    ]
    last = "".join(traceback.format_exception_only(error)).strip()
    if not own:
        return last
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(own), last])
