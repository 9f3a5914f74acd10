"""`summary`: what `miles status RUN --json` prints."""

from __future__ import annotations

from dataclasses import asdict

from milescli.insight.facts import read_facts
from milescli.insight.summary import summarize
from milescli.web.asked import Asked, Json


def summary(asked: Asked) -> Json:
    """Of a run or an adapter, as of now."""
    facts = read_facts(asked.run)
    with asked.history() as history:
        return asdict(summarize(asked.run, history, facts))
