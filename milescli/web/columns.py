"""Implements `names` and `columns`: the figures of a run's steps for a chart, thinned if there are
more steps than points."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from milescli.core.history import Columns
from milescli.core.metric_names import metric_of
from milescli.web.responses import BadRequest
from milescli.web.run_request import Json, RunRequest

MAX_NAMES = 64
"""Largest number of columns of one response."""
MAX_POINTS = 20_000
MAX_STEP = 2**53


def names(request: RunRequest) -> Json:
    """List every column that the run has, in the order of appearance."""
    with request.history() as history:
        known = list(history.columns)
    return {"columns": [_describe_column(name) for name in known]}


def columns(request: RunRequest) -> Json:
    """Return the named columns at the same steps. A column without figures is all null."""
    wanted = request.query.texts("name")
    if len(wanted) > MAX_NAMES:
        raise BadRequest(
            f"{len(wanted)} columns are too many at once",
            why=f"a response has {MAX_NAMES} at most",
            fix="ask for some, and then for the others",
        )
    points = request.query.count("points", 2000, low=2, high=MAX_POINTS)
    first = request.query.number("first", None, high=MAX_STEP)
    last = request.query.number("last", None, high=MAX_STEP)
    with request.history() as history:
        return chart_columns(history.columns, wanted, points=points, first=first, last=last)


def chart_columns(
    columns: Columns,
    names: Sequence[str],
    *,
    points: int,
    first: int | None = None,
    last: int | None = None,
) -> Json:
    """Return the figures of the steps `first` to `last`, thinned to at most about `points` of
    them."""
    begin, end = _range(columns, first=first, last=last)
    values = {name: columns.get(name)[begin:end].tolist() for name in names}
    steps, times = columns.steps[begin:end].tolist(), columns.times[begin:end].tolist()
    if len(steps) > points:
        changing = [column for column in values.values() if len(set(column)) > 1]
        places = thin_steps(changing, length=len(steps), points=points)
        steps, times = [steps[at] for at in places], [times[at] for at in places]
        values = {name: [column[at] for at in places] for name, column in values.items()}
    return {
        "first": steps[0] if steps else None,
        "last": steps[-1] if steps else None,
        "num_steps": end - begin,
        "steps": steps,
        "times": times,
        "columns": values,
    }


def thin_steps(columns: Sequence[Sequence[float]], *, length: int, points: int) -> list[int]:
    """Return ascending indices to draw, at most `points` of them if possible: the first, the last,
    and of each range between them the smallest and the largest figure of every column. If there are
    too many columns for that, use one range."""
    stretches = max(1, (points - 2) // max(1, 2 * len(columns)))
    places = {0, length - 1} if length else set()
    for number in range(stretches):
        begin, end = number * length // stretches, (number + 1) * length // stretches
        places.update(_extremes(columns, range(begin, end)))
    return sorted(places)


def _describe_column(name: str) -> Json:
    metric = metric_of(name)  # None: a figure of an objective or an agent of the user's own
    return {
        "name": name,
        "section": name.partition("/")[0],
        "unit": metric.unit if metric else "",
        "about": metric.about if metric else "",
    }


def _range(columns: Columns, *, first: int | None, last: int | None) -> tuple[int, int]:
    begin = 0 if first is None else bisect_left(columns.steps, first)
    end = len(columns) if last is None else bisect_right(columns.steps, last)
    return begin, max(begin, end)


def _extremes(columns: Sequence[Sequence[float]], stretch: range) -> list[int]:
    if not columns:
        return [stretch.start] if stretch else []
    places = list[int]()
    for column in columns:
        if figures := [at for at in stretch if math.isfinite(column[at])]:
            places += [min(figures, key=column.__getitem__), max(figures, key=column.__getitem__)]
    return places
