"""A reward curve as an SVG file: small, without fonts or scripts from elsewhere, readable on light
and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

Point = tuple[float, float]
WIDTH, HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 34, 40
_REWARD, _EVAL, _TEXT, _GRID = "#2563eb", "#d97706", "#334155", "#cbd5e1"
_MAX_TICKS = 6


def reward_curve(rewards: Sequence[Point], evals: Sequence[Point], *, title: str) -> str:
    """(step, mean reward of the step) as a line, (step, accuracy on held-out prompts) as dots.
    Points that are not finite are left out."""
    rewards, evals = _finite(rewards), _finite(evals)
    every = [*rewards, *evals]
    assert every, "a curve needs a point"
    steps = ticks(min(step for step, _ in every), max(step for step, _ in every), whole=True)
    values = ticks(min(0.0, *(value for _, value in every)), max(value for _, value in every))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" fill="{_TEXT}" font-weight="bold">{escape(title)}</text>',
    ]
    for value in values:
        y = _y(value, values)
        lines.append(
            f'<line x1="{_LEFT}" y1="{y}" x2="{WIDTH - _RIGHT}" y2="{y}" stroke="{_GRID}"/>'
        )
        lines.append(
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" fill="{_TEXT}" '
            f'text-anchor="end">{value:g}</text>'
        )
    for step in steps:
        lines.append(
            f'<text x="{_x(step, steps)}" y="{HEIGHT - 22}" fill="{_TEXT}" '
            f'text-anchor="middle">{step:g}</text>'
        )
    lines.append(
        f'<text x="{(WIDTH + _LEFT) / 2:.0f}" y="{HEIGHT - 6}" fill="{_TEXT}" '
        'text-anchor="middle">step</text>'
    )
    if rewards:
        path = " ".join(f"{_x(step, steps)},{_y(value, values)}" for step, value in rewards)
        lines.append(
            f'<polyline points="{path}" fill="none" stroke="{_REWARD}" stroke-width="2" '
            'stroke-linejoin="round"/>'
        )
    lines += [
        f'<circle cx="{_x(step, steps)}" cy="{_y(value, values)}" r="4" fill="{_EVAL}"/>'
        for step, value in evals
    ]
    lines += _legend(bool(rewards), bool(evals))
    return "\n".join([*lines, "</svg>"]) + "\n"


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


def _legend(has_rewards: bool, has_evals: bool) -> list[str]:
    lines, right = [], WIDTH - _RIGHT
    for wanted, word, color in (
        (has_evals, "held-out accuracy", _EVAL),
        (has_rewards, "mean reward", _REWARD),
    ):
        if wanted:
            lines.append(f'<text x="{right}" y="20" fill="{color}" text-anchor="end">{word}</text>')
            right -= 8 * len(word)
    return lines


def _x(step: float, steps: Sequence[float]) -> float:
    share = (step - steps[0]) / (steps[-1] - steps[0])
    return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)


def _y(value: float, values: Sequence[float]) -> float:
    share = (value - values[0]) / (values[-1] - values[0])
    return round(HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM), 1)


def _finite(points: Sequence[Point]) -> list[Point]:
    return [(step, value) for step, value in points if math.isfinite(step) and math.isfinite(value)]
