"""Colours of all pictures, on light and on dark pages and on paper, and how an SVG begins and
ends."""

from __future__ import annotations

from collections.abc import Sequence
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
