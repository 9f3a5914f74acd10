"""Lines over axes: a figure of each step, or a few dots. One picture, small, with a legend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from milescli.pictures.scale import Point, finite, thinned, ticks
from milescli.pictures.style import GRID_STROKE, INK_FILL, drawn, fill, stroke

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
