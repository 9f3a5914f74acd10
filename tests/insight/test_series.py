"""A change is one only where it is larger than the noise, also where neighbours resemble."""

from __future__ import annotations

import math

import numpy as np
import pytest

from milescli.insight.series import change, early, recent, trend


def test_a_line_has_its_slope_and_no_error() -> None:
    told = trend(np.arange(50) * 0.5)
    assert told.change == pytest.approx(24.5) and told.error == pytest.approx(0.0, abs=1e-9)


def test_noise_is_seldom_called_a_change() -> None:
    draw = np.random.default_rng(0)
    wrong = sum(trend(draw.standard_normal(60)).is_rising for _ in range(1000))
    assert wrong < 20


def test_noise_that_resembles_its_neighbours_is_not_called_one_much_more() -> None:
    draw = np.random.default_rng(0)
    wrong = 0
    for _ in range(500):
        values = np.zeros(120)
        for at in range(1, 120):
            values[at] = 0.5 * values[at - 1] + draw.standard_normal()
        wrong += trend(values).is_rising
    assert wrong < 25


def test_windows_are_a_tenth_and_a_fifth_and_skip_what_is_no_number() -> None:
    values = [math.nan, *range(100), math.inf]
    assert early(values).tolist() == list(range(10))
    assert recent(values).tolist() == list(range(80, 100))
    assert change(values).change == pytest.approx(89.5 - 4.5)
    assert math.isnan(trend([1.0, 2.0]).change)
