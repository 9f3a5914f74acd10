"""`summary`: what `miles status RUN --json` prints."""

from __future__ import annotations

from dataclasses import asdict, replace

from milescli.insight.facts import read_facts
from milescli.insight.summary import state_of, summarize
from milescli.web.asked import Asked, Json


def summary(asked: Asked) -> Json:
    """Of a run or an adapter, as of now."""
    facts = read_facts(asked.run)
    with asked.history() as history:
        told = summarize(asked.run, history, facts)
    if asked.shown.above is not None:  # an adapter goes on and ends with the run that trains it
        with asked.histories.reading(asked.shown.above) as history:
            told = replace(told, state=state_of(asked.shown.above, history))
    return asdict(told)
