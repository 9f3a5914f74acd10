"""HTML without a template language: text is escaped unless it was made here. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


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
    return Markup("".join(_text(child) for child in children))


def table(head: Sequence[str], rows: Sequence[Sequence[Child]], *, cls: str = "") -> Markup:
    """Of whatever stands in the cells; a number stands at the right."""
    body = (el("tr", (el("td", cell, cls=_side(cell)) for cell in row)) for row in rows)
    top = el("thead", el("tr", (el("th", word, scope="col") for word in head))) if head else None
    return el("div", el("table", top, el("tbody", body), cls=cls), cls="wide")


def _side(cell: Child) -> str:
    text = cell if isinstance(cell, str) else ""
    return "number" if text[:1].isdigit() or text[:2].lstrip("+-").isdigit() else ""


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return escape(child)
    return joined(child)
