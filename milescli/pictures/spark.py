"""A sparkline: how a figure went, in the size of a word. No axis, no number."""

from __future__ import annotations

from collections.abc import Sequence

from milescli.pictures.scale import finite, thinned
from milescli.pictures.style import drawn, fill, stroke

_EDGE = 3


def spark_picture(
    values: Sequence[float],
    *,
    title: str,
    color: int = 0,
    width: int = 120,
    height: int = 28,
    is_inline: bool = False,
) -> str:
    """From the lowest to the highest value; a dot stands at the last. Empty where no value is
    finite."""
    points = thinned(finite(list(enumerate(values))), 2 * width)
    if not points:
        return ""
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, last = points[0][0], points[-1][0]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first) if last > first else 1.0
        up = (y - low) / (high - low) if high > low else 0.5
        return (
            round(_EDGE + across * (width - 2 * _EDGE), 1),
            round(height - _EDGE - up * (height - 2 * _EDGE), 1),
        )

    drawn_at = [place(x, y) for x, y in points]
    path = " ".join(f"{x},{y}" for x, y in drawn_at)
    end_x, end_y = drawn_at[-1]
    body = [
        f'<polyline points="{path}" fill="none" {stroke(color)} stroke-width="1.5" '
        'stroke-linejoin="round"/>',
        f'<circle cx="{end_x}" cy="{end_y}" r="2.2" {fill(color)}/>',
    ]
    return drawn(body, width=width, height=height, title=title, about="", is_inline=is_inline)
