"""A bar made of parts, with the share of each below it: where the time of a step goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from milescli.pictures.style import INK_FILL, PAPER, drawn, fill

WIDTH = 520
"""Pixels: its words are to be read on a phone."""
_BAR_HEIGHT, _ROW, _COLUMN, _EDGE = 26, 20, 170, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the parts."""

    name: str
    size: float
    """In whatever unit all have; a part without size is left out."""
    note: str
    """What is written behind its name."""


def stacked_bar(
    parts: Sequence[Part],
    *,
    title: str,
) -> str:
    """Of a page that has `style.STYLE`. Each as wide as its share. Raises AssertionError where no
    part has a size."""
    kept = [(color, part) for color, part in enumerate(parts) if part.size > 0]
    whole = sum(part.size for _, part in kept)
    assert whole > 0, "a bar needs a part"
    inside, left = WIDTH - 2 * _EDGE, float(_EDGE)
    columns = max(1, inside // _COLUMN)
    body = [f'<text x="{_EDGE}" y="20" {INK_FILL} font-weight="bold">{escape(title)}</text>']
    for place, (color, part) in enumerate(kept):
        wide = inside * part.size / whole
        words = escape(f"{part.name} {part.note}")
        body.append(
            f'<rect x="{left:.1f}" y="30" width="{wide:.1f}" height="{_BAR_HEIGHT}" {fill(color)}>'
            f"<title>{words}</title></rect>"
        )
        if left > _EDGE:
            body.append(
                f'<line x1="{left:.1f}" y1="30" x2="{left:.1f}" y2="{30 + _BAR_HEIGHT}" '
                f'class="mp-edge" stroke="{PAPER[0]}" stroke-width="1.5"/>'
            )
        left += wide
        row, column = divmod(place, columns)
        x, y = _EDGE + column * _COLUMN, 30 + _BAR_HEIGHT + 20 + row * _ROW
        body.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" rx="2" {fill(color)}/>')
        body.append(f'<text x="{x + 17}" y="{y}" {INK_FILL}>{words}</text>')
    rows = -(-len(kept) // columns)
    height = 30 + _BAR_HEIGHT + 12 + rows * _ROW
    return drawn(body, width=WIDTH, height=height, title=title, is_inline=True)
