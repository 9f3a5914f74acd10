"""Charts as SVG text: line charts, sparklines and stacked bars, in the colors of the light and the
dark theme. Pure; called by `report` and the model card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LIGHT = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#64748b")
"""Of the first, second, ... line or part; they begin again where there are more."""
DARK = ("#60a5fa", "#fbbf24", "#34d399", "#c084fc", "#f87171", "#22d3ee", "#94a3b8")
PAPER, INK, GRID = ("#ffffff", "#0f172a"), ("#334155", "#cbd5e1"), ("#cbd5e1", "#334155")
"""(light, dark)"""


def _dark() -> str:
    rules = [
        f".mp-paper{{fill:{PAPER[1]}}}",
        f".mp-ink{{fill:{INK[1]}}}",
        f".mp-grid{{stroke:{GRID[1]}}}",
        f".mp-edge{{stroke:{PAPER[1]}}}",
        *(f".mp-l{place}{{stroke:{color}}}" for place, color in enumerate(DARK)),
        *(f".mp-f{place}{{fill:{color}}}" for place, color in enumerate(DARK)),
    ]
    return "@media screen and (prefers-color-scheme:dark){" + "".join(rules) + "}"


STYLE = _dark()
"""What a page needs that holds pictures which are made with `is_inline`."""


def stroke(color: int) -> str:
    """Attributes of a line."""
    place = color % len(LIGHT)
    return f'class="mp-l{place}" stroke="{LIGHT[place]}"'


def fill(color: int) -> str:
    """Attributes of a dot, a bar or a word."""
    place = color % len(LIGHT)
    return f'class="mp-f{place}" fill="{LIGHT[place]}"'


INK_FILL = f'class="mp-ink" fill="{INK[0]}"'
GRID_STROKE = f'class="mp-grid" stroke="{GRID[0]}"'


def drawn(
    body: Sequence[str], *, width: int, height: int, title: str, about: str = "", is_inline: bool
) -> str:
    """A whole picture. `title` and `about` are what screen readers say. `is_inline`: it goes into a
    page that has STYLE and sets its size; else it is a file of its own, on its own paper."""
    assert width > 0 and height > 0, (width, height)
    size = "" if is_inline else f' width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"{size} '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
    ]
    if about:
        lines.append(f"<desc>{escape(about)}</desc>")
    if not is_inline:
        lines.append(f"<style>{STYLE}</style>")
        lines.append(
            f'<rect width="{width}" height="{height}" rx="6" class="mp-paper" fill="{PAPER[0]}"/>'
        )
    return "\n".join([*lines, *body, "</svg>"]) + "\n"


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


WIDTH, HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 34, 40
_LETTER = 6.6
"""Pixels that a letter of the legend takes, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure over steps."""

    name: str
    """For the legend."""
    points: Sequence[Point]
    """(step, value); those that are not finite are left out."""
    color: int = 0
    """Place in `style.LIGHT`."""
    as_dots: bool = False
    """Single measurements, which nothing is known between."""
    is_faint: bool = False
    """Drawn behind the others: what a mean was taken of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    width: int
    height: int
    across: Sequence[float]
    up: Sequence[float]

    def x(self, value: float) -> float:
        share = (value - self.across[0]) / (self.across[-1] - self.across[0])
        return round(_LEFT + share * (self.width - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.up[0]) / (self.up[-1] - self.up[0])
        return round(self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM), 1)


def line_picture(
    lines: Sequence[Line],
    *,
    title: str,
    about: str = "",
    from_zero: bool = True,
    width: int = WIDTH,
    height: int = HEIGHT,
    is_inline: bool = False,
) -> str:
    """All lines over the same axes. `from_zero`: the upright axis holds 0. Raises AssertionError
    where there is no finite point at all."""
    drawable = [(line, finite(line.points)) for line in lines]
    every = [point for _, points in drawable for point in points]
    assert every, "a picture needs a point"
    lowest = min(value for _, value in every)
    frame = _Frame(
        width=width,
        height=height,
        across=ticks(min(x for x, _ in every), max(x for x, _ in every), whole=True),
        up=ticks(min(0.0, lowest) if from_zero else lowest, max(value for _, value in every)),
    )
    body = [f'<text x="12" y="20" {INK_FILL} font-weight="bold">{escape(title)}</text>']
    body += [*_axes(frame), *_legend(drawable, width)]
    for line, points in sorted(drawable, key=lambda one: not one[0].is_faint):
        body += _one(line, thinned(points, max(4, width)), frame)
    return drawn(body, width=width, height=height, title=title, about=about, is_inline=is_inline)


def reward_curve(rewards: Sequence[Point], evals: Sequence[Point], *, title: str) -> str:
    """(step, mean reward of the step) as a line, (step, accuracy on held-out prompts) as dots: a
    file for a model card."""
    return line_picture(
        [
            Line(name="mean reward", points=rewards),
            Line(name="held-out accuracy", points=evals, color=1, as_dots=True),
        ],
        title=title,
    )


def _axes(frame: _Frame) -> list[str]:
    right, low = frame.width - _RIGHT, frame.height
    body = []
    for value in frame.up:
        y = frame.y(value)
        body.append(f'<line x1="{_LEFT}" y1="{y}" x2="{right}" y2="{y}" {GRID_STROKE}/>')
        body.append(
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" {INK_FILL} text-anchor="end">{value:g}</text>'
        )
    for value in frame.across:
        body.append(
            f'<text x="{frame.x(value)}" y="{low - 22}" {INK_FILL} '
            f'text-anchor="middle">{value:g}</text>'
        )
    body.append(
        f'<text x="{(frame.width + _LEFT) / 2:.0f}" y="{low - 6}" {INK_FILL} '
        'text-anchor="middle">step</text>'
    )
    return body


def _one(line: Line, points: Sequence[Point], frame: _Frame) -> list[str]:
    if line.as_dots or len(points) == 1:
        return [
            f'<circle cx="{frame.x(x)}" cy="{frame.y(y)}" r="4" {fill(line.color)}/>'
            for x, y in points
        ]
    if not points:
        return []
    path = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in points)
    faint = ' stroke-opacity="0.35"' if line.is_faint else ""
    return [
        f'<polyline points="{path}" fill="none" {stroke(line.color)} stroke-width="2" '
        f'stroke-linejoin="round"{faint}/>'
    ]


def _legend(drawable: Sequence[tuple[Line, list[Point]]], width: int) -> list[str]:
    body, right = [], width - _RIGHT
    for line, points in reversed(drawable):
        if points and not line.is_faint:
            body.append(
                f'<text x="{right:.0f}" y="20" {fill(line.color)} text-anchor="end">'
                f"{escape(line.name)}</text>"
            )
            right -= _LETTER * len(line.name) + 16
    return body


SPARK_WIDTH, SPARK_HEIGHT = 120, 28
_SPARK_EDGE = 3


def spark_picture(
    values: Sequence[float],
    *,
    title: str,
) -> str:
    """Of a page that has `style.STYLE`. From the lowest to the highest value; a dot stands at the
    last. Empty where no value is finite."""
    points = thinned(finite(list(enumerate(values))), 2 * SPARK_WIDTH)
    if not points:
        return ""
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, last = points[0][0], points[-1][0]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first) if last > first else 1.0
        up = (y - low) / (high - low) if high > low else 0.5
        return (
            round(_SPARK_EDGE + across * (SPARK_WIDTH - 2 * _SPARK_EDGE), 1),
            round(SPARK_HEIGHT - _SPARK_EDGE - up * (SPARK_HEIGHT - 2 * _SPARK_EDGE), 1),
        )

    drawn_at = [place(x, y) for x, y in points]
    path = " ".join(f"{x},{y}" for x, y in drawn_at)
    end_x, end_y = drawn_at[-1]
    body = [
        f'<polyline points="{path}" fill="none" {stroke(0)} stroke-width="1.5" '
        'stroke-linejoin="round"/>',
        f'<circle cx="{end_x}" cy="{end_y}" r="2.2" {fill(0)}/>',
    ]
    return drawn(body, width=SPARK_WIDTH, height=SPARK_HEIGHT, title=title, is_inline=True)


BAR_WIDTH = 520
"""Pixels: its words are to be read on a phone."""
_BAR_HEIGHT, _ROW, _COLUMN, _BAR_EDGE = 26, 20, 170, 12


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
    inside, left = BAR_WIDTH - 2 * _BAR_EDGE, float(_BAR_EDGE)
    columns = max(1, inside // _COLUMN)
    body = [f'<text x="{_BAR_EDGE}" y="20" {INK_FILL} font-weight="bold">{escape(title)}</text>']
    for place, (color, part) in enumerate(kept):
        wide = inside * part.size / whole
        words = escape(f"{part.name} {part.note}")
        body.append(
            f'<rect x="{left:.1f}" y="30" width="{wide:.1f}" height="{_BAR_HEIGHT}" {fill(color)}>'
            f"<title>{words}</title></rect>"
        )
        if left > _BAR_EDGE:
            body.append(
                f'<line x1="{left:.1f}" y1="30" x2="{left:.1f}" y2="{30 + _BAR_HEIGHT}" '
                f'class="mp-edge" stroke="{PAPER[0]}" stroke-width="1.5"/>'
            )
        left += wide
        row, column = divmod(place, columns)
        x, y = _BAR_EDGE + column * _COLUMN, 30 + _BAR_HEIGHT + 20 + row * _ROW
        body.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" rx="2" {fill(color)}/>')
        body.append(f'<text x="{x + 17}" y="{y}" {INK_FILL}>{words}</text>')
    rows = -(-len(kept) // columns)
    height = 30 + _BAR_HEIGHT + 12 + rows * _ROW
    return drawn(body, width=BAR_WIDTH, height=height, title=title, is_inline=True)
