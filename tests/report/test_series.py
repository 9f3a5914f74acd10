"""The test of two curves: of equal runs it finds as few differences as it says, of unequal ones it
finds them; and what is told beside it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from milescli.report.series import (
    MIN_STEPS,
    area,
    common_level,
    common_width,
    first_step_at,
    mean_difference,
    paired_differences,
    ratio_of_medians,
    trailing_means,
)

PAIRS = 400


def course(
    draw: np.random.Generator, *, steps: int, alike: float, lift: float = 0.0
) -> NDArray[np.float64]:
    """A run's rewards: they rise, and noise of which a share `alike` stays from step to step."""
    noise, fresh = np.empty(steps), draw.standard_normal(steps)
    noise[0] = fresh[0]
    for step in range(1, steps):
        noise[step] = alike * noise[step - 1] + np.sqrt(1 - alike**2) * fresh[step]
    return 0.8 - 0.6 * np.exp(-4 * np.arange(steps) / steps) + lift + 0.05 * noise


def share_seen(*, steps: int, alike: float, lift: float) -> float:
    """Of PAIRS pairs of runs, those that are called different; of some nothing is said."""
    draw = np.random.default_rng(7)
    seen = 0
    for _ in range(PAIRS):
        a = course(draw, steps=steps, alike=alike, lift=lift)
        told = mean_difference(a - course(draw, steps=steps, alike=alike))
        seen += told is not None and told.is_significant
    return seen / PAIRS


@pytest.mark.parametrize(("steps", "alike"), [(30, 0.0), (60, 0.5), (200, 0.5)])
def test_equal_runs_are_called_different_at_about_the_nominal_rate(
    steps: int, alike: float
) -> None:
    # of 400 pairs at 5%, 20 +- 4.4
    assert 0.015 <= share_seen(steps=steps, alike=alike, lift=0.0) <= 0.1


def test_a_test_that_takes_steps_as_independent_would_call_many_equal_runs_different() -> None:
    draw, seen = np.random.default_rng(7), 0
    for _ in range(PAIRS):
        gains = course(draw, steps=60, alike=0.8) - course(draw, steps=60, alike=0.8)
        seen += abs(gains.mean()) > 2.0 * gains.std(ddof=1) / np.sqrt(len(gains))
    assert seen / PAIRS > 0.35


@pytest.mark.parametrize("steps", [20, 60, 100, 300])
@pytest.mark.parametrize("alike", [0.8, 0.9, 0.95, 0.99])
def test_neighbours_that_are_much_alike_are_allowed_for(steps: int, alike: float) -> None:
    # 5 % are nominal, of 400 pairs +- 1.1 points; where all were tested, up to 44 % were seen
    assert share_seen(steps=steps, alike=alike, lift=0.0) <= 0.085


def test_curves_that_differ_clearly_are_told_apart_though_neighbours_are_alike() -> None:
    assert share_seen(steps=200, alike=0.8, lift=0.1) > 0.8


@pytest.mark.parametrize(("steps", "alike"), [(30, 0.0), (60, 0.5)])
def test_a_planted_difference_is_found(steps: int, alike: float) -> None:
    assert share_seen(steps=steps, alike=alike, lift=0.06) > 0.8


def test_the_interval_holds_the_true_difference_about_as_often_as_it_says() -> None:
    draw, held = np.random.default_rng(3), 0
    for _ in range(PAIRS):
        a = course(draw, steps=80, alike=0.3, lift=0.02)
        told = mean_difference(a - course(draw, steps=80, alike=0.3))
        held += told.low <= 0.02 <= told.high
    assert 0.9 <= held / PAIRS <= 0.985


def test_few_steps_say_nothing_and_equal_curves_are_equal() -> None:
    assert mean_difference([0.5] * (MIN_STEPS - 1)) is None
    same = mean_difference([0.0] * 40)
    assert same.p_value == 1.0 and not same.is_significant and same.low == same.high == 0.0
    apart = mean_difference([0.25] * 40)
    assert apart.is_significant and apart.value == 0.25


def test_only_steps_that_both_have_are_paired() -> None:
    a, b = {1: 1.0, 2: 2.0, 4: float("nan"), 5: 5.0}, {2: 1.5, 4: 1.0, 5: 1.0, 9: 0.0}
    assert paired_differences(a, b) == ([2, 5], [0.5, 4.0])


def test_the_area_is_the_mean_height() -> None:
    values = {1: 0.0, 2: 1.0, 4: 1.0}
    assert area(values, [1, 2, 4]) == pytest.approx((0.5 + 2.0) / 3)
    assert area(values, [2]) == 1.0


def test_a_level_that_both_reach_is_reached_first_by_the_faster() -> None:
    fast = {step: min(1.0, step / 20) for step in range(1, 101)}
    slow = {step: min(0.9, step / 60) for step in range(1, 101)}
    level = common_level(fast, slow, rises=True)
    first, second = (first_step_at(one, level, rises=True, width=10) for one in (fast, slow))
    assert 0.7 < level < 0.9 and first < second
    assert first_step_at(slow, 0.95, rises=True, width=10) is None
    falling = {step: 1.0 - value for step, value in fast.items()}
    assert first_step_at(falling, 0.5, rises=False, width=10) == first_step_at(
        fast, 0.5, rises=True, width=10
    )
    assert common_level(fast, falling, rises=True) is None


def test_the_trailing_mean_looks_back_alone() -> None:
    values = {step: float(step == 50) for step in range(1, 101)}
    smooth = trailing_means(values, 10)
    assert smooth[49] == 0.0 and smooth[50] == pytest.approx(0.1) == smooth[59]
    assert smooth[60] == pytest.approx(0.0, abs=1e-12)


def test_a_spike_is_forgotten_when_it_is_a_tenth_of_the_run_ago() -> None:
    values = {step: 1e20 if step == 5 else 1.0 for step in range(1, 101)}
    assert [trailing_means(values, 10)[step] for step in range(15, 101)] == [1.0] * 86


def test_a_run_that_goes_on_longer_reached_a_value_no_later() -> None:
    """Smoothing over a tenth of each run said that of two equal curves the longer was slower."""
    short, long = ({step: 1 - 1 / step for step in range(1, last)} for last in (101, 1001))
    width = common_width(short, long)
    assert width == common_width(long, short) == 10
    level = common_level(short, long, rises=True)
    assert level == common_level(short, short, rises=True)
    reached = [first_step_at(one, level, rises=True, width=width) for one in (short, long)]
    assert reached[0] == reached[1] is not None


def test_medians_are_compared_where_there_are_some() -> None:
    assert ratio_of_medians([2.0, 9.0, 4.0], [2.0]) == 2.0
    assert ratio_of_medians([], [1.0]) is None
