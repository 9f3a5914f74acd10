"""What is drawn of a run: figures that are there, thinned, with a trend where steps are many."""

from __future__ import annotations

from math import fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.core.history import History
from milescli.report.charts import (
    MOST_POINTS,
    learning_charts,
    smoothed,
    time_charts,
    with_trend,
)
from tests.insight.planted import Planted, line, rows_history


@given(values=st.lists(st.floats(-100, 100), min_size=1, max_size=200))
def test_the_trend_is_the_mean_of_neighbours(values: list[float]) -> None:
    points = [(float(step), value) for step, value in enumerate(values)]
    half = max(1, len(values) // 40)
    for place, (x, y) in enumerate(smoothed(points)):
        near = values[max(0, place - half) : place + half + 1]
        assert x == place and y == pytest.approx(fsum(near) / len(near), abs=1e-9)


def test_a_spike_is_seen_by_its_neighbours_alone() -> None:
    points = [(float(step), 1e20 if step == 5 else 1.0) for step in range(100)]
    trend = smoothed(points)
    assert trend[5][1] > 1e19 and [y for _, y in trend[8:]] == [1.0] * 92


def test_few_steps_are_drawn_as_they_are_and_many_with_their_trend() -> None:
    few = with_trend([(1.0, 1.0), (2.0, 3.0)], name="reward")
    assert [one.name for one in few] == ["reward"]
    faint, trend = with_trend([(float(n), n % 7) for n in range(5000)], name="reward")
    assert faint.is_faint and not trend.is_faint
    assert len(faint.points) <= MOST_POINTS and len(trend.points) <= MOST_POINTS
    assert max(y for _, y in faint.points) == 6 and max(y for _, y in trend.points) < 4


def test_only_what_was_told_is_drawn() -> None:
    names = {chart.name for chart in learning_charts(Planted().history())}
    assert {"reward", "entropy", "groups", "length", "mismatch", "gradient"} <= names
    assert "kl" not in names and "warmup" not in names
    assert {chart.name for chart in time_charts(Planted().history())} == {"seconds", "speed"}
    rows = learning_charts(rows_history(line(2.0, 1.0), line(2.0, 1.2)))
    assert rows[0].name == "loss" and len(rows[0].lines[-1].points) == 12
    assert learning_charts(History()) == [] == time_charts(History())
