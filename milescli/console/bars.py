"""Bars that say what a whole is made of: one line per part, each beginning where the one before
ended. Pure; drawn by `Output.table`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from milescli.console import theme

_FULL, _LEFT = "█", "░"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One part of a whole."""

    name: str
    size: float
    is_free: bool = False
    """Nobody takes it: drawn faintly."""


def staircase(segments: Sequence[Segment], *, total: float, width: int) -> list[Text]:
    """[segments] a line each of `width` characters for `total`. What is there at all is seen: a
    part has one character at least. Parts beyond the total stand beyond the width, and are drawn in
    red."""
    lines, before = [], 0.0
    for segment in segments:
        start = _place(before, total, width)
        end = max(_place(before + segment.size, total, width), start + (segment.size > 0))
        mark = _LEFT if segment.is_free else _FULL
        inside = max(0, min(end, width) - start)
        line = Text(
            " " * start + mark * inside, style=theme.QUIET if segment.is_free else theme.ACCENT
        )
        line.append(mark * max(0, end - max(start, width)), style=theme.BAD)
        lines.append(line)
        before += max(0.0, segment.size)
    return lines


def _place(size: float, total: float, width: int) -> int:
    return round(width * size / total) if total > 0 else 0
