"""Draws the picture of a model card: reward over steps as SVG text, in the colours of the light and
the dark theme, without scripts and external fonts. Pure. The page of `milescli.web`, whose charts
need a browser, shows runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 34, 40
_LETTER = 6.6
"""Approximate width in pixels of a letter of the legend."""
_COLORS = (("#2563eb", "#60a5fa"), ("#d97706", "#fbbf24"))
"""(light, dark) of the rewards, and of the accuracies."""
_PAPER, _INK, _GRID = ("#ffffff", "#0f172a"), ("#334155", "#cbd5e1"), ("#cbd5e1", "#334155")
_DARK = "@media screen and (prefers-color-scheme:dark){" + "".join(
    [
        f".mp-paper{{fill:{_PAPER[1]}}}",
        f".mp-ink{{fill:{_INK[1]}}}",
        f".mp-grid{{stroke:{_GRID[1]}}}",
        f".mp-l0{{stroke:{_COLORS[0][1]}}}",
        *(f".mp-f{place}{{fill:{dark}}}" for place, (_, dark) in enumerate(_COLORS)),
        "}",
    ]
)
_INK_FILL = f'class="mp-ink" fill="{_INK[0]}"'
_MAX_TICKS = 6

Point = tuple[float, float]


def reward_curve(rewards: Sequence[Point], evals: Sequence[Point], *, title: str) -> str:
    """Draw (step, mean reward of the step) as a line and (step, accuracy on held-out prompts) as
    dots, and return the whole SVG file. Omits points that are not finite; raises AssertionError if
    no point is finite."""
    line, dots = finite(rewards), finite(evals)
    assert line or dots, "a picture needs a point"
    xs, ys = zip(*line, *dots, strict=True)
    across, up = ticks(min(xs), max(xs), whole=True), ticks(min(0.0, *ys), max(ys))

    def place(point: Point) -> Point:
        shares = [
            (value - axis[0]) / (axis[-1] - axis[0])
            for value, axis in zip(point, (across, up), strict=True)
        ]
        return (
            round(_LEFT + shares[0] * (WIDTH - _LEFT - _RIGHT), 1),
            round(HEIGHT - _BOTTOM - shares[1] * (HEIGHT - _TOP - _BOTTOM), 1),
        )

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="12" role="img" '
        f'aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_DARK}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" class="mp-paper" fill="{_PAPER[0]}"/>',
        f'<text x="12" y="20" {_INK_FILL} font-weight="bold">{escape(title)}</text>',
        *(_vertical_axis([(value, place((across[0], value))[1]) for value in up])),
        *(_horizontal_axis([(value, place((value, up[0]))[0]) for value in across])),
        *_legend([("mean reward", bool(line)), ("held-out accuracy", bool(dots))]),
    ]
    few = [place(point) for point in thinned(line, WIDTH)]
    if len(few) > 1:
        path = " ".join(f"{x},{y}" for x, y in few)
        lines.append(
            f'<polyline points="{path}" fill="none" class="mp-l0" stroke="{_COLORS[0][0]}" '
            'stroke-width="2" stroke-linejoin="round"/>'
        )
    for color, points in enumerate((few if len(few) == 1 else [], [place(one) for one in dots])):
        lines += [f'<circle cx="{x}" cy="{y}" r="4" {_fill(color)}/>' for x, y in points]
    return "\n".join([*lines, "</svg>"]) + "\n"


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return round numbers from at or below `low` to at or above `high`; at least two."""
    # values that are equal but for rounding have no scale of their own
    span = high - low if high - low > 1e-9 * max(abs(low), abs(high), 1e-3) else max(abs(high), 1.0)
    step = 10.0 ** math.floor(math.log10(span / _MAX_TICKS))
    step *= next(factor for factor in (1, 2, 5, 10, 20) if span / (step * factor) <= _MAX_TICKS)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(number * step, digits) for number in range(first, max(last, first + 1) + 1)]


def finite(points: Sequence[Point]) -> list[Point]:
    """Return the points of which both numbers are finite."""
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` points (at least four) in their order: the first and the last, and the
    lowest and the highest of each stretch between them, so that no spike is lost."""
    assert most >= 4, most
    if len(points) <= most:
        return list(points)
    stretches = (most - 2) // 2
    indices = {0, len(points) - 1}
    for number in range(stretches):
        start, end = (1 + edge * (len(points) - 2) // stretches for edge in (number, number + 1))
        places = range(start, end)
        indices.add(min(places, key=lambda place: points[place][1]))
        indices.add(max(places, key=lambda place: points[place][1]))
    return [points[place] for place in sorted(indices)]


def _fill(color: int) -> str:
    return f'class="mp-f{color}" fill="{_COLORS[color][0]}"'


def _vertical_axis(marks: Sequence[Point]) -> list[str]:
    """Draw the vertical axis: (value, y) of each grid line."""
    body = []
    for value, y in marks:
        body.append(
            f'<line x1="{_LEFT}" y1="{y}" x2="{WIDTH - _RIGHT}" y2="{y}" class="mp-grid" '
            f'stroke="{_GRID[0]}"/>'
        )
        body.append(
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" {_INK_FILL} text-anchor="end">{value:g}</text>'
        )
    return body


def _horizontal_axis(marks: Sequence[Point]) -> list[str]:
    """Draw the labels of the horizontal axis: (value, x) of each."""
    body = [
        f'<text x="{x}" y="{HEIGHT - 22}" {_INK_FILL} text-anchor="middle">{value:g}</text>'
        for value, x in marks
    ]
    middle = f'x="{(WIDTH + _LEFT) / 2:.0f}" y="{HEIGHT - 6}"'
    return [*body, f'<text {middle} {_INK_FILL} text-anchor="middle">step</text>']


def _legend(names: Sequence[tuple[str, bool]]) -> list[str]:
    """Draw the legend, from the right edge on."""
    body, right = [], float(WIDTH - _RIGHT)
    for color, (name, is_drawn) in reversed([*enumerate(names)]):
        if is_drawn:
            body.append(
                f'<text x="{right:.0f}" y="20" {_fill(color)} text-anchor="end">{name}</text>'
            )
            right -= _LETTER * len(name) + 16
    return body
