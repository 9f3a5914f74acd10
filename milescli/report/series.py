"""Two runs step by step: is the difference of two curves more than chance? Pure.

The steps of a run are no independent draws: what was learned stays, so that neighbours are alike,
and a test that counts each step as one finds differences everywhere. Here the variance of the mean
difference is estimated over all lags at once, by the lowest cosine waves of the series, and held
against Student's t (the EWC test: Lazarus, Lewis, Stock and Watson 2018, HAR inference:
recommendations for practice, J. Business & Economic Statistics 36:541). What is alike from a step
to the next is taken out before, and its share put back after (prewhitening: Andrews and Monahan
1992, Econometrica 60:953).

`insight.series` has Newey and West's variance, which suits its bar of three standard errors for the
slope of one run; a p-value by it is too small (Lazarus et al.: at a level of 5% it calls 25% of
equal pairs different, of 100 steps whose neighbours correlate by 0.8).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np
from numpy.typing import NDArray

from milescli.rollout.evaluation.statistics import LEVEL, t_quantile, two_sided_p

MIN_STEPS = 16
"""With fewer steps there is no test: there would be fewer than 3 waves."""
MIN_INDEPENDENT_STEPS = 10
"""Independent steps that a series must be worth for a test: with fewer, equal runs whose neighbours
correlate by 0.8 to 1 would be called different in 8 % to 70 % of pairs. With this many, in 7 % at
most."""
MAX_CORRELATION = 0.97
"""Largest correlation of neighbours that is removed (Andrews and Monahan 1992)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanDifference:
    """Describes the mean difference of A and B over the steps that both have done."""

    value: float
    low: float
    high: float
    """Upper end of the LEVEL interval."""
    p_value: float
    num_waves: int
    """Degrees of freedom: 0.4 x steps^(2/3), as the source recommends."""

    @property
    def is_significant(self) -> bool:
        """Return True if chance alone would rarely cause such a difference."""
        return self.p_value < 1 - LEVEL


def paired_differences(
    a: Mapping[int, float], b: Mapping[int, float]
) -> tuple[list[int], list[float]]:
    """Return (steps that both have, A minus B at each), ascending."""
    steps = sorted(step for step in a.keys() & b.keys() if math.isfinite(a[step] - b[step]))
    return steps, [a[step] - b[step] for step in steps]


def mean_difference(gains: Sequence[float]) -> MeanDifference | None:
    """Test the mean of `gains`, A minus B at each step in order. Return None if there are fewer
    than FEWEST_STEPS, or neighbours are so alike that they are worth less than FEWEST_APART."""
    num = len(gains)
    if num < MIN_STEPS:
        return None
    mean = math.fsum(gains) / num
    waves = max(3, int(0.4 * num ** (2 / 3)))
    centred = np.asarray(gains, np.float64) - mean
    alike = _neighbour_correlation(centred)
    if num * (1 - alike) / (1 + alike) < MIN_INDEPENDENT_STEPS:
        return None
    alike = min(alike, MAX_CORRELATION)
    fresh = centred[1:] - alike * centred[:-1]
    error = math.sqrt(float(np.mean(_waves(fresh, waves) ** 2)) / num) / (1 - alike)
    if error <= 1e-12 * max(1.0, abs(mean)):
        p_value = 1.0 if abs(mean) <= 1e-12 else 0.0
        return MeanDifference(value=mean, low=mean, high=mean, p_value=p_value, num_waves=waves)
    half = t_quantile(0.5 + LEVEL / 2, waves) * error
    return MeanDifference(
        value=mean,
        low=mean - half,
        high=mean + half,
        p_value=two_sided_p(mean / error, waves),
        num_waves=waves,
    )


def _neighbour_correlation(centred: NDArray[np.float64]) -> float:
    """Return the correlation of neighbours, from 0 to 1; `centred` has mean 0. A short series
    underestimates it by (1 + 3 r) / T (Kendall 1954, Biometrika 41:403), which is added."""
    square = float(centred @ centred)
    correlation = float(centred[1:] @ centred[:-1]) / square if square else 0.0
    return min(max(correlation + (1 + 3 * correlation) / len(centred), 0.0), 1.0)


def _waves(series: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Return [count] the coefficients of the cosine waves with j = 1, 2, ... half periods:
    sqrt(2/T) sum d_t cos(pi j (t - 1/2) / T). They do not depend on the mean."""
    num = len(series)
    turns = np.pi * np.arange(1, count + 1) / num
    waves = np.cos(np.outer(turns, np.arange(num) + 0.5))
    return np.sqrt(2 / num) * (waves @ series)


def area(values: Mapping[int, float], steps: Sequence[int]) -> float:
    """Return the area under the curve by trapezoids, as a mean height over at least one step."""
    if len(steps) == 1:
        return values[steps[0]]
    parts = (
        (after - before) * (values[after] + values[before]) / 2 for before, after in pairwise(steps)
    )
    return math.fsum(parts) / (steps[-1] - steps[0])


def common_width(a: Mapping[int, float], b: Mapping[int, float]) -> int:
    """Return the number of steps over which both curves are smoothed: a tenth of the shorter one,
    at least 1. One of its own would say of the longer run that it reached the same value later."""
    return max(1, min(len(a), len(b)) // 10)


def trailing_means(values: Mapping[int, float], width: int) -> dict[int, float]:
    """Return the mean of each step and those before it, `width` in all: a curve to compare with a
    threshold."""
    steps = sorted(values)
    sums = np.convolve([values[step] for step in steps], np.ones(width))[: len(steps)]
    means = sums / np.minimum(np.arange(len(steps)) + 1, width)
    return dict(zip(steps, means.tolist(), strict=True))


def first_step_at(
    values: Mapping[int, float], level: float, *, rises: bool, width: int
) -> int | None:
    """Return the first step whose trailing mean is at the level or better; None if none is."""
    smooth = trailing_means(values, width)
    return next(
        (
            step
            for step in sorted(smooth)
            if (smooth[step] >= level if rises else smooth[step] <= level)
        ),
        None,
    )


def common_level(a: Mapping[int, float], b: Mapping[int, float], *, rises: bool) -> float | None:
    """Return a level that both reach: nine tenths of the way from where they begin to the worse of
    their ends. None if one of them does not improve."""
    width = common_width(a, b)
    smooth = [trailing_means(one, width) for one in (a, b)]
    begins = [one[min(one)] for one in smooth]
    ends = [one[max(one)] for one in smooth]
    begin, end = (max(begins), min(ends)) if rises else (min(begins), max(ends))
    if (end <= begin) if rises else (end >= begin):
        return None
    return begin + 0.9 * (end - begin)


def ratio_of_medians(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the ratio of the medians; None if either series is empty."""
    return median(a) / median(b) if a and b and median(b) > 0 else None
