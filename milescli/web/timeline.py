"""`timeline`: who did what from when to when, over some steps."""

from __future__ import annotations

import math
from dataclasses import asdict

from milescli.insight.timeline import Interval, beside_steps, of_run, of_steps
from milescli.web.asked import Asked, Json

MAX_INTERVALS = 20_000
"""The newest of them."""
DEFAULT_STEPS = 50


def timeline(asked: Asked) -> Json:
    """Of the steps `first` to `last`; the last 50 where none are named. With the first step comes
    what was before it, with the last one what came after."""
    with asked.history() as history:
        steps = history.columns.steps
        newest = steps[-1] if steps else 0
        last = asked.question.count("last", newest)
        first = asked.question.count("first", max(1, last - DEFAULT_STEPS + 1))
        intervals = of_steps(history, first=first, last=last)
        begin_s = min((one.begin_s for one in intervals), default=math.nan)
        end_s = max((one.end_s for one in intervals), default=math.nan)
        begin_s = -math.inf if not steps or first <= steps[0] else begin_s
        end_s = math.inf if last >= newest else end_s
        beside = [*of_run(history), *beside_steps(history)]
        intervals += [one for one in beside if _touches(one, begin_s=begin_s, end_s=end_s)]
    intervals = sorted(intervals, key=lambda one: one.begin_s)[-MAX_INTERVALS:]
    return {
        "begin_s": min((one.begin_s for one in intervals), default=None),
        "end_s": max((one.end_s for one in intervals), default=None),
        "intervals": [asdict(one) for one in intervals],
    }


def _touches(one: Interval, *, begin_s: float, end_s: float) -> bool:
    """Whether it is known and within."""
    return one.end_s >= begin_s and one.begin_s <= end_s  # not of NaN
