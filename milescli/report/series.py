"""Two runs step by step: is the difference of two curves more than chance? Pure.

The steps of a run are no independent draws: what was learned stays, so that neighbours are alike,
and a test that counts each step as one finds differences everywhere. Here the variance of the mean
difference is estimated over all lags at once, by the lowest cosine waves of the series, and held
against Student's t (the EWC test: Lazarus, Lewis, Stock and Watson 2018, HAR inference:
recommendations for practice, J. Business & Economic Statistics 36:541; Mueller 2004).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

import numpy as np
from numpy.typing import NDArray

from milescli.report.student import t_quantile, two_sided_p

LEVEL = 0.95
"""Of every interval."""
FEWEST_STEPS = 16
"""Under it no test says anything: there would be less than 3 waves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanDifference:
    """Of A less B, mean over the steps that both have done."""

    value: float
    low: float
    high: float
    """Of the LEVEL interval."""
    p_value: float
    num_steps: int
    num_waves: int
    """Degrees of freedom: 0.4 x steps^(2/3), as the source recommends."""

    @property
    def is_seen(self) -> bool:
        """Chance alone would seldom show it."""
        return self.p_value < 1 - LEVEL


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """(steps that both have, A less B at each), ascending."""
    steps = sorted(step for step in a.keys() & b.keys() if math.isfinite(a[step] - b[step]))
    return steps, [a[step] - b[step] for step in steps]


def mean_difference(gains: Sequence[float]) -> MeanDifference | None:
    """`gains`: A less B at each step, in order. None where there are fewer than FEWEST_STEPS."""
    num = len(gains)
    if num < FEWEST_STEPS:
        return None
    mean = math.fsum(gains) / num
    waves = max(3, int(0.4 * num ** (2 / 3)))
    long_run = float(np.mean(_waves(gains, waves) ** 2))
    error = math.sqrt(long_run / num)
    if error <= 1e-12 * max(1.0, abs(mean)):
        p_value = 1.0 if abs(mean) <= 1e-12 else 0.0
        return MeanDifference(
            value=mean, low=mean, high=mean, p_value=p_value, num_steps=num, num_waves=waves
        )
    half = t_quantile(0.5 + LEVEL / 2, waves) * error
    return MeanDifference(
        value=mean,
        low=mean - half,
        high=mean + half,
        p_value=two_sided_p(mean / error, waves),
        num_steps=num,
        num_waves=waves,
    )


def _waves(gains: Sequence[float], count: int) -> NDArray[np.float64]:
    """[count] the shares of the cosine waves with j = 1, 2, ... half periods: sqrt(2/T) sum d_t
    cos(pi j (t - 1/2) / T). They do not see the mean."""
    num = len(gains)
    turns = np.pi * np.arange(1, count + 1) / num
    waves = np.cos(np.outer(turns, np.arange(num) + 0.5))
    return np.sqrt(2 / num) * (waves @ np.asarray(gains, np.float64))


def area(values: Mapping[int, float], steps: Sequence[int]) -> float:
    """Under the curve by trapezoids, as a mean height: over the steps alone, at least one."""
    if len(steps) == 1:
        return values[steps[0]]
    parts = (
        (after - before) * (values[after] + values[before]) / 2 for before, after in pairwise(steps)
    )
    return math.fsum(parts) / (steps[-1] - steps[0])


def trailing(values: Mapping[int, float]) -> dict[int, float]:
    """Mean of each step and those before it, a tenth of all: a curve that a threshold can be held
    against."""
    steps = sorted(values)
    width = max(1, len(steps) // 10)
    sums = list(accumulate((values[step] for step in steps), initial=0.0))
    starts = (max(0, place - width + 1) for place in range(len(steps)))
    return {
        step: (sums[place + 1] - sums[start]) / (place + 1 - start)
        for place, (step, start) in enumerate(zip(steps, starts, strict=True))
    }


def reached(values: Mapping[int, float], level: float, *, rises: bool) -> int | None:
    """The first step whose trailing mean is at the level or better; None where none is."""
    smooth = trailing(values)
    return next(
        (
            step
            for step in sorted(smooth)
            if (smooth[step] >= level if rises else smooth[step] <= level)
        ),
        None,
    )


def common_level(a: Mapping[int, float], b: Mapping[int, float], *, rises: bool) -> float | None:
    """What both reach: nine tenths of the way from where they begin to the worse of their ends.
    None where one of them gets no better."""
    smooth = [trailing(one) for one in (a, b)]
    if not all(smooth):
        return None
    begins = [one[min(one)] for one in smooth]
    ends = [one[max(one)] for one in smooth]
    begin, end = (max(begins), min(ends)) if rises else (min(begins), max(ends))
    if (end <= begin) if rises else (end >= begin):
        return None
    return begin + 0.9 * (end - begin)


def ratio_of_medians(a: Sequence[float], b: Sequence[float]) -> float | None:
    """None where either has nothing."""
    return median(a) / median(b) if a and b and median(b) > 0 else None
