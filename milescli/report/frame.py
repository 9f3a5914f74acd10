"""The HTML file around a report: one file, whose content policy allows its own script and style by
their hashes and nothing else, no network above all. Also the builder of its markup, which escapes
all text."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from milescli import __version__
from milescli.pictures.svg import DARK, LIGHT, STYLE, line_picture
from milescli.report.charts import Chart


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | Iterable[str] | None


def el(name: str, *children: Child, **attributes: str) -> Markup:
    """`el("p", "a < b", cls="note")` -> <p class="note">a &lt; b</p>. `cls` is class; an empty
    attribute is left out. None is no child."""
    head = "".join(
        f' {"class" if key == "cls" else key}="{escape(value)}"'
        for key, value in attributes.items()
        if value
    )
    return Markup(f"<{name}{head}>{joined(children)}</{name}>")


def joined(children: Iterable[Child]) -> Markup:
    """One after the other."""
    return Markup("".join(_escaped(child) for child in children))


def table(head: Sequence[str], rows: Sequence[Sequence[Child]], *, cls: str = "") -> Markup:
    """Of whatever stands in the cells; a number stands at the right."""
    body = (el("tr", (el("td", cell, cls=_side(cell)) for cell in row)) for row in rows)
    top = el("thead", el("tr", (el("th", word, scope="col") for word in head))) if head else None
    return el("div", el("table", top, el("tbody", body), cls=cls), cls="wide")


def _side(cell: Child) -> str:
    text = cell if isinstance(cell, str) else ""
    return "number" if text[:1].isdigit() or text[:2].lstrip("+-").isdigit() else ""


def _escaped(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return escape(child)
    return joined(child)


MARK = '<meta name="generator" content="miles report">'
"""By which a file of ours is known."""
_WIDE, _NARROW, _HEIGHT = 720, 480, 260
_DIGITS = 5
"""Of figures in charts."""


def framed(body: Sequence[Child], *, title: str, charts: Sequence[Chart]) -> str:
    """A whole file."""
    vendored = files("milescli") / "vendored" / "uplot"
    own = files("milescli") / "report"
    style = "\n".join([_text(vendored / "uPlot.min.css"), _text(own / "page.css"), STYLE])
    licence = f"/*\n{_text(vendored / 'LICENSE')}*/"
    script = "\n".join([licence, _text(vendored / "uPlot.iife.min.js"), _text(own / "page.js")])
    assert "</" + "script" not in script.lower() and "</" + "style" not in style.lower()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            MARK,
            f'<meta name="miles-version" content="{escape(__version__)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{escape(title)}</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            el("main", *body),
            f'<script type="application/json" id="data">{_data(charts)}</script>',
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def chart_grid(charts: Sequence[Chart]) -> Markup:
    """All of them, the first over the whole width."""
    return el(
        "div", (_figure(chart, is_wide=not n) for n, chart in enumerate(charts)), cls="charts"
    )


def _figure(chart: Chart, *, is_wide: bool) -> Markup:
    picture = line_picture(
        chart.lines,
        title=chart.title,
        about=chart.about,
        from_zero=chart.from_zero,
        width=_WIDE if is_wide else _NARROW,
        height=_HEIGHT,
        is_inline=True,
    )
    return el(
        "figure",
        el("div", Markup(picture), cls="still"),
        el("div", cls="live"),
        el("figcaption", chart.about),
        id=f"chart-{chart.name}",
    )


def _data(charts: Sequence[Chart]) -> str:
    payload: dict[str, Any] = {
        "colors": [LIGHT, DARK],
        "charts": [
            {
                "name": chart.name,
                "title": chart.title,
                "zero": chart.from_zero,
                "lines": [
                    {
                        "name": line.name,
                        "color": line.color,
                        "dots": line.as_dots,
                        "faint": line.is_faint,
                        "x": [int(x) if x == int(x) else x for x, _ in line.points],
                        "y": [float(f"{y:.{_DIGITS}g}") for _, y in line.points],
                    }
                    for line in chart.lines
                    if line.points
                ],
            }
            for chart in charts
        ],
    }
    text = json.dumps(payload, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode()


def _text(file: Traversable) -> str:
    return file.read_text(encoding="utf-8")
