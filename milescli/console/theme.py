"""Defines colours and small drawings, in one place. Colour is only used where it has a meaning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

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

PHASES = {
    "rollout": "cyan",
    "pack": "blue",
    "train": "magenta",
    "publish": "green",
    "save": "yellow",
}
"""Phase of a step -> its colour."""

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(
    values: Sequence[float], width: int, *, low: float | None = None, high: float | None = None
) -> str:
    """Draw at most `width` characters: the mean of each part of `values`. A value that is NaN
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


_FULL, _LEFT = "█", "░"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Describes one part of a whole."""

    name: str
    size: float
    is_free: bool = False
    """True if it is unused: drawn faintly."""


def staircase(segments: Sequence[Segment], *, total: float, width: int) -> list[Text]:
    """Draw [segments] lines of `width` characters for `total`. A part has one character at least.
    Parts beyond the total exceed the width, and are red."""
    lines, before = [], 0.0
    for segment in segments:
        start = _place(before, total, width)
        end = max(_place(before + segment.size, total, width), start + (segment.size > 0))
        mark = _LEFT if segment.is_free else _FULL
        inside = max(0, min(end, width) - start)
        line = Text(" " * start + mark * inside, style=QUIET if segment.is_free else ACCENT)
        line.append(mark * max(0, end - max(start, width)), style=BAD)
        lines.append(line)
        before += max(0.0, segment.size)
    return lines


def _place(size: float, total: float, width: int) -> int:
    return round(width * size / total) if total > 0 else 0
