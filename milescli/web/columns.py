"""`names` and `columns`: the figures of a run's steps as a chart draws them, thinned where there
are more steps than points."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from milescli.core.history import Columns
from milescli.core.metric_names import metric_of
from milescli.web.asked import Asked, Json
from milescli.web.responses import BadRequest

MAX_NAMES = 64
"""Largest number of columns of one response."""
MAX_POINTS = 20_000
MAX_STEP = 2**53


def names(asked: Asked) -> Json:
    """List every column that the run has, in the order of appearance."""
    with asked.history() as history:
        known = list(history.columns)
    return {"columns": [_described(name) for name in known]}


def columns(asked: Asked) -> Json:
    """Return the named columns at the same steps. A column that no step has is all null."""
    wanted = asked.question.texts("name")
    if len(wanted) > MAX_NAMES:
        raise BadRequest(
            f"{len(wanted)} columns are too many at once",
            why=f"a response has {MAX_NAMES} at most",
            fix="ask for some, and then for the others",
        )
    points = asked.question.count("points", 2000, low=2, high=MAX_POINTS)
    first = asked.question.number("first", None, high=MAX_STEP)
    last = asked.question.number("last", None, high=MAX_STEP)
    with asked.history() as history:
        return drawn(history.columns, wanted, points=points, first=first, last=last)


def drawn(
    held: Columns,
    names: Sequence[str],
    *,
    points: int,
    first: int | None = None,
    last: int | None = None,
) -> Json:
    """Return the figures of the steps `first` to `last`, of at most about `points` of them."""
    begin, end = _range(held, first=first, last=last)
    values = {name: held.get(name)[begin:end].tolist() for name in names}
    steps, times = held.steps[begin:end].tolist(), held.times[begin:end].tolist()
    if len(steps) > points:
        changing = [column for column in values.values() if len(set(column)) > 1]
        kept = thinned(changing, length=len(steps), points=points)
        steps, times = [steps[at] for at in kept], [times[at] for at in kept]
        values = {name: [column[at] for at in kept] for name, column in values.items()}
    return {
        "first": steps[0] if steps else None,
        "last": steps[-1] if steps else None,
        "num_steps": end - begin,
        "steps": steps,
        "times": times,
        "columns": values,
    }


def thinned(columns: Sequence[Sequence[float]], *, length: int, points: int) -> list[int]:
    """Choose places to draw, ascending, at most `points` where that is possible: the first, the
    last, and of each stretch between them the smallest and the largest figure of every column. With
    so many columns that not even one stretch has room, one stretch."""
    stretches = max(1, (points - 2) // max(1, 2 * len(columns)))
    kept = {0, length - 1} if length else set()
    for number in range(stretches):
        begin, end = number * length // stretches, (number + 1) * length // stretches
        kept.update(_extremes(columns, range(begin, end)))
    return sorted(kept)


def _described(name: str) -> Json:
    metric = metric_of(name)  # None: a figure of an objective or an agent of the user's own
    return {
        "name": name,
        "section": name.partition("/")[0],
        "unit": metric.unit if metric else "",
        "about": metric.about if metric else "",
    }


def _range(held: Columns, *, first: int | None, last: int | None) -> tuple[int, int]:
    begin = 0 if first is None else bisect_left(held.steps, first)
    end = len(held) if last is None else bisect_right(held.steps, last)
    return begin, max(begin, end)


def _extremes(columns: Sequence[Sequence[float]], stretch: range) -> list[int]:
    if not columns:
        return [stretch.start] if stretch else []
    kept = list[int]()
    for column in columns:
        if figures := [at for at in stretch if math.isfinite(column[at])]:
            kept += [min(figures, key=column.__getitem__), max(figures, key=column.__getitem__)]
    return kept
