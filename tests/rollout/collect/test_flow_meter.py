"""The figures of how rollout and training met: by a clock that the test turns."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from milescli.core.events import FlowStats
from milescli.rollout.collect.collector import FlowMeter


def test_idle_seconds_and_samples_in_the_making_are_since_the_last_reading() -> None:
    now = [100.0]
    meter = FlowMeter(clock=lambda: now[0])
    with ExitStack() as one:
        now[0] += 3.0  # nothing runs
        one.enter_context(meter.sample())
        now[0] += 2.0
        with meter.sample():
            now[0] += 5.0
        assert meter.read() == FlowStats(idle_s=3.0, running_mean=1.2)
        now[0] += 4.0
    now[0] += 1.0
    stats = meter.read()
    assert (stats.idle_s, stats.running_mean) == (1.0, pytest.approx(0.8))


def test_a_sample_that_fails_is_no_more_in_the_making() -> None:
    now = [0.0]
    meter = FlowMeter(clock=lambda: now[0])
    with pytest.raises(ValueError, match="planted"), meter.sample():
        raise ValueError("planted")
    now[0] = 2.0
    assert meter.read().idle_s == 2.0


def test_no_time_is_no_division() -> None:
    assert FlowMeter(clock=lambda: 1.0).read() == FlowStats()
