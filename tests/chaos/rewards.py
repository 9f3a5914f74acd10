"""The reward of all trials. It does harm once where a file beside it asks for it. A trial copies
this module to where it runs, so that it is a user's own."""

from __future__ import annotations

import re
import time
from pathlib import Path

WISH = Path(__file__).with_name("wish")
"""Has the harm's name; whoever takes it away does it."""


def variety(*, prompt: str, response: str, label: str | None) -> float:
    """Share of different characters in the response."""
    wish = _taken_wish()
    if wish == "raise":
        raise RuntimeError("chaos")
    if wish == "hang":
        re.fullmatch(r"(a+)+b", "a" * 64)
    if wish == "nan":
        return float("nan")
    return len(set(response)) / max(len(response), 1)


def paced(*, prompt: str, response: str, label: str | None) -> float:
    """The same, later: there is time to do harm within each step."""
    time.sleep(0.5)
    return variety(prompt=prompt, response=response, label=label)


def _taken_wish() -> str | None:
    try:
        return WISH.rename(WISH.with_name("granted")).read_text()
    except OSError:  # there is none, or another process was faster
        return None
