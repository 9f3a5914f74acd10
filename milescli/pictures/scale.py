"""Where numbers stand on an axis: round ticks, finite points, and fewer points where there are more
than pixels. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, float]
_MAX_TICKS = 6


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`; at least two."""
    # values that are equal but for rounding have no scale of their own
    span = high - low if high - low > 1e-9 * max(abs(low), abs(high), 1e-3) else max(abs(high), 1.0)
    step = 10.0 ** math.floor(math.log10(span / _MAX_TICKS))
    step *= next(factor for factor in (1, 2, 5, 10, 20) if span / (step * factor) <= _MAX_TICKS)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(number * step, digits) for number in range(first, max(last, first + 1) + 1)]


def finite(points: Sequence[Point]) -> list[Point]:
    """Those of which both numbers are."""
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` of them, at least four, in their order: of each stretch the lowest and the
    highest stay, and the first and the last of all, so that no spike is lost."""
    assert most >= 4, most
    if len(points) <= most:
        return list(points)
    stretches = (most - 2) // 2
    kept = {0, len(points) - 1}
    for number in range(stretches):
        start, end = (1 + edge * (len(points) - 2) // stretches for edge in (number, number + 1))
        places = range(start, end)
        kept.add(min(places, key=lambda place: points[place][1]))
        kept.add(max(places, key=lambda place: points[place][1]))
    return [points[place] for place in sorted(kept)]
