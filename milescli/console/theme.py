"""Colours and small drawings, in one place. Colour is used only where it says something."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

HEADER = "dim"
TITLE = "bold"
LABEL = "dim"
QUIET = "dim"
COMMAND = "cyan"
GOOD = "green"
WARN = "yellow"
BAD = "bold red"
ACCENT = "cyan"
REWARD = "green"
LEARNED = "green underline"
BORDER = "bright_black"

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(
    values: Sequence[float], width: int, *, low: float | None = None, high: float | None = None
) -> str:
    """`width` characters at most: the mean of each part of `values`. A value that is no number
    leaves a gap."""
    if not values or width < 1:
        return ""
    parts = _shrink(values, width)
    finite = [value for value in parts if math.isfinite(value)]
    if not finite:
        return " " * len(parts)
    bottom = min(finite) if low is None else low
    top = max(finite) if high is None else high
    span = (top - bottom) or 1.0
    return "".join(_bar((value - bottom) / span) for value in parts)


def _bar(share: float) -> str:
    if not math.isfinite(share):
        return " "
    return _BARS[min(len(_BARS) - 1, max(0, int(share * len(_BARS))))]


def _shrink(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [place * len(values) // width for place in range(width + 1)]
    return [_mean(values[start:end]) for start, end in pairwise(edges)]


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
