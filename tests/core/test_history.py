"""Figures of steps as columns: gaps are NaN, and steps that are done again take their places."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.core.events import RunEnded, VerdictGiven, stamped
from milescli.core.history import Columns, History


def test_a_figure_that_comes_late_or_goes_leaves_gaps() -> None:
    columns = Columns()
    columns.add(1, {"a": 1.0})
    columns.add(2, {"b": 2.0})
    columns.add(3, {"a": 3.0})
    assert columns["a"].tolist() == pytest.approx([1.0, math.nan, 3.0], nan_ok=True)
    assert columns["b"].tolist() == pytest.approx([math.nan, 2.0, math.nan], nan_ok=True)
    assert "c" not in columns and all(math.isnan(value) for value in columns.get("c"))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40))
def test_a_step_that_is_done_again_takes_the_place_of_it_and_of_all_after(steps: list[int]) -> None:
    columns, model = Columns(), dict[int, float]()
    for value, step in enumerate(steps):
        columns.add(step, {"a": float(value)})
        model = {number: kept for number, kept in model.items() if number < step}
        model[step] = float(value)
    assert dict(zip(columns.steps, columns["a"], strict=True)) == model
    assert list(columns.steps) == sorted(columns.steps)


def test_points_are_those_that_are_finite_and_a_row_is_what_one_step_has() -> None:
    columns = Columns()
    columns.add(1, {"a": 1.0})
    columns.add(3, {"a": math.inf, "b": 2.0})
    assert columns.points("a") == [(1, 1.0)] and columns.points("b") == [(3, 2.0)]
    assert columns.points("c") == []
    assert columns.row(-1) == {"a": math.inf, "b": 2.0}
    assert math.isnan(columns.row(0)["b"])


def test_the_newest_verdict_and_what_the_attempt_took_are_known() -> None:
    history = History()
    assert history.verdict is None and math.isnan(history.took_s)
    for headline in ("Too early.", "It is learning."):
        history.feed(stamped(VerdictGiven(step=1, headline=headline, is_learning=True)))
    history.feed(stamped(RunEnded(outcome="done", step=1, seconds=12.5)))
    assert history.verdict is not None and history.verdict["headline"] == "It is learning."
    assert (history.outcome, history.took_s) == ("done", 12.5)


def test_the_seconds_of_earlier_attempts_are_added_without_the_pauses_between() -> None:
    history = History()
    for second, phase in ((0, "start"), (2, "train"), (9, "stop"), (50, "start"), (55, "train")):
        time = f"2026-12-01T10:00:{second:02}Z"
        history.feed({"time": time, "event": "PhaseStarted", "phase": phase})
    assert history.earlier_s == 9.0 and history.last_s - history.began_s == 5.0
