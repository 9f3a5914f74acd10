"""`told`: what happened in a run, as a list that can be searched."""

from __future__ import annotations

from dataclasses import asdict

from milescli.insight.history import Told
from milescli.web.asked import Asked, Json

MAX_LIMIT = 5000


def told(asked: Asked) -> Json:
    """Oldest first; `offset` counts those that fit the question."""
    ask = asked.question
    kind, level, text = ask.text("kind"), ask.text("level"), ask.text("q").lower()
    offset, limit = ask.count("offset", 0), ask.count("limit", 200, high=MAX_LIMIT)
    with asked.history() as history:
        fitting = [one for one in history.told if _fits(one, kind=kind, level=level, text=text)]
    shown = fitting[offset : offset + limit]
    return {"total": len(fitting), "told": [asdict(one) for one in shown]}


def _fits(one: Told, *, kind: str, level: str, text: str) -> bool:
    return (
        (not kind or one.kind == kind)
        and (not level or one.level == level)
        and (not text or text in one.text.lower() or text in one.kind.lower())
    )
