"""Sparklines."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from milescli.console.theme import sparkline


def test_a_rise_is_drawn_as_a_rise() -> None:
    assert sparkline([0, 1, 2, 3], 10) == "▁▃▆█"
    assert sparkline([0.5, 0.5], 10) == "▁▁"
    assert sparkline([0.5], 10, low=0.0, high=1.0) == "▅"


def test_gaps_stay_gaps() -> None:
    assert sparkline([0.0, math.nan, 1.0], 10) == "▁ █"
    assert sparkline([math.nan], 10) == " "
    assert sparkline([], 10) == ""


@given(st.lists(st.floats(-1e9, 1e9), max_size=300), st.integers(0, 80))
def test_it_is_never_wider_than_asked(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) <= max(0, width)
