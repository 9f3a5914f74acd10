"""Computes statistics of a metric over the steps: means of windows, and whether it rises by more
than its noise. Pure; values that are not finite are left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

EARLY_SHARE, RECENT_SHARE = 0.1, 0.2
MIN_WINDOW, MAX_WINDOW = 5, 50
"""Steps of a window."""
MIN_STANDARD_ERRORS = 3.0
"""Smallest change that counts as significant, in standard errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Describes a straight line through a series."""

    change: float
    """Change from the first to the last step, on the line."""
    error: float
    """Standard error of the change, which allows for correlation between neighbouring steps."""

    @property
    def is_rising(self) -> bool:
        """Return True if it rises by more than noise."""
        return self.change > MIN_STANDARD_ERRORS * self.error

    @property
    def is_falling(self) -> bool:
        """Return True if it falls by more than noise."""
        return self.change < -MIN_STANDARD_ERRORS * self.error


def finite(values: Sequence[float]) -> np.ndarray:
    """Return the finite values, [n] float64."""
    whole = np.asarray(values, dtype=np.float64)
    return whole[np.isfinite(whole)]


def early(values: Sequence[float]) -> np.ndarray:
    """Return the values of the first steps: a tenth of them, 5 to 50."""
    whole = finite(values)
    return whole[: _length(len(whole), EARLY_SHARE)]


def recent(values: Sequence[float]) -> np.ndarray:
    """Return the values of the last steps: a fifth of them, 5 to 50."""
    whole = finite(values)
    return whole[len(whole) - _length(len(whole), RECENT_SHARE) :]


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN without values."""
    whole = finite(values)
    return float(whole.mean()) if len(whole) else math.nan


def median(values: Sequence[float]) -> float:
    """Return the median; NaN without values."""
    whole = finite(values)
    return float(np.median(whole)) if len(whole) else math.nan


def trend(values: Sequence[float]) -> Trend:
    """Fit a line over the steps by least squares, with the standard error of Newey and West
    (Econometrica 55 (1987), 703-708), whose lags are 4 (n / 100)^(2/9). Fewer than four values give
    NaN."""
    y = finite(values)
    n = len(y)
    if n < 4:
        return Trend(change=math.nan, error=math.nan)
    x = np.arange(n) - (n - 1) / 2
    spread = float((x * x).sum())
    slope = float((x * y).sum()) / spread
    rest = x * (y - y.mean() - slope * x)
    lags = min(n - 2, int(4 * (n / 100) ** (2 / 9)))
    variance = float((rest * rest).sum())
    for lag in range(1, lags + 1):
        weight = 1 - lag / (lags + 1)
        variance += 2 * weight * float((rest[lag:] * rest[:-lag]).sum())
    variance = max(variance, 0.0) * n / (n - 2)
    return Trend(change=slope * (n - 1), error=math.sqrt(variance) / spread * (n - 1))


def change(values: Sequence[float]) -> Trend:
    """Return the change from the mean of the first steps to the mean of the last ones. The error
    includes the noise of each window, without the window's own trend."""
    first, last = early(values), recent(values)
    if len(finite(values)) < 2 * MIN_WINDOW:
        return Trend(change=math.nan, error=math.nan)
    variance = _noise(first) / len(first) + _noise(last) / len(last)
    return Trend(change=float(last.mean() - first.mean()), error=math.sqrt(variance))


def _noise(values: np.ndarray) -> float:
    """Return the variance about the local trend: half the mean square of the differences of
    neighbours (von Neumann, Annals of Mathematical Statistics 12 (1941), 367-395)."""
    return float((np.diff(values) ** 2).mean()) / 2 if len(values) > 1 else 0.0


def _length(n: int, share: float) -> int:
    return min(n, max(MIN_WINDOW, min(MAX_WINDOW, round(n * share))))
