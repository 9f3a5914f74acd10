"""A sparkline: how a figure went, in the size of a word. No axis, no number."""

from __future__ import annotations

from collections.abc import Sequence

from milescli.pictures.scale import finite, thinned
from milescli.pictures.style import drawn, fill, stroke

WIDTH, HEIGHT = 120, 28
_EDGE = 3


def spark_picture(
    values: Sequence[float],
    *,
    title: str,
) -> str:
    """Of a page that has `style.STYLE`. From the lowest to the highest value; a dot stands at the
    last. Empty where no value is finite."""
    points = thinned(finite(list(enumerate(values))), 2 * WIDTH)
    if not points:
        return ""
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, last = points[0][0], points[-1][0]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first) if last > first else 1.0
        up = (y - low) / (high - low) if high > low else 0.5
        return (
            round(_EDGE + across * (WIDTH - 2 * _EDGE), 1),
            round(HEIGHT - _EDGE - up * (HEIGHT - 2 * _EDGE), 1),
        )

    drawn_at = [place(x, y) for x, y in points]
    path = " ".join(f"{x},{y}" for x, y in drawn_at)
    end_x, end_y = drawn_at[-1]
    body = [
        f'<polyline points="{path}" fill="none" {stroke(0)} stroke-width="1.5" '
        'stroke-linejoin="round"/>',
        f'<circle cx="{end_x}" cy="{end_y}" r="2.2" {fill(0)}/>',
    ]
    return drawn(body, width=WIDTH, height=HEIGHT, title=title, is_inline=True)
