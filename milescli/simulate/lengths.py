"""Draws lengths of responses: log-normal with a given mean, or those of a finished run. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

BLOCK = 1 << 12
"""Number of groups that are drawn at once."""


class Lengths(Protocol):
    """Draws the lengths of groups of responses, from the given generator."""

    @property
    def mean(self) -> float:
        """Return the mean length in tokens."""

    def cut(self, longest: int) -> Lengths:
        """Return the lengths of the same responses where each is cut at `longest` tokens."""

    def draw(self, rng: np.random.Generator, *, groups: int, samples: int) -> np.ndarray:
        """Return [groups, samples] whole numbers of tokens, at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Draws log-normal lengths, truncated at the longest that the recipe allows."""

    mean: float
    """Mean of the lengths after the cut, in tokens."""
    sigma: float
    """Standard deviation of the logarithm before the cut; 0: all are equal."""
    longest: int
    """Tokens at which a response is cut."""

    def cut(self, longest: int) -> LogNormal:
        """Return the lengths of the same responses where each is cut at `longest` tokens."""
        if longest >= self.longest:
            return self
        mean = _mean_after_cut(log_mean(self), self.sigma, longest)
        return LogNormal(mean=mean, sigma=self.sigma, longest=longest)

    def draw(self, rng: np.random.Generator, *, groups: int, samples: int) -> np.ndarray:
        """Return [groups, samples] lengths."""
        drawn = rng.lognormal(log_mean(self), self.sigma, (groups, samples))
        return np.rint(np.clip(drawn, 1, self.longest)).astype(np.int64)


def log_mean(lengths: LogNormal) -> float:
    """Return the mean of the logarithm at which the truncated lengths have their mean: that mean
    rises with it, so that bisection finds it."""
    sigma = lengths.sigma
    if sigma == 0:
        return math.log(lengths.mean)
    low, high = math.log(lengths.mean) - sigma**2 / 2, math.log(lengths.longest) + 20 * sigma
    for _ in range(80):
        m = (low + high) / 2
        if _mean_after_cut(m, sigma, lengths.longest) < lengths.mean:
            low = m
        else:
            high = m
    return (low + high) / 2


def _mean_after_cut(m: float, sigma: float, longest: int) -> float:
    """Return E min(X, c) of a log-normal X with mean m and deviation s of its logarithm: exp(m +
    s^2 / 2) Phi((ln c - m - s^2) / s) + c (1 - Phi((ln c - m) / s)), with Phi the normal
    distribution."""
    cut = math.log(longest)
    if sigma == 0:
        return math.exp(min(m, cut))

    def phi(x: float) -> float:
        return (1 + math.erf(x / math.sqrt(2))) / 2

    short = math.exp(m + sigma**2 / 2) * phi((cut - m - sigma**2) / sigma)
    return short + longest * (1 - phi((cut - m) / sigma))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Draws whole groups of a finished run, so that long prompts stay together."""

    groups: Sequence[Sequence[int]]
    """[num_groups][num_samples] tokens of responses."""

    @property
    def mean(self) -> float:
        """Return the mean length in tokens."""
        lengths = [length for group in self.groups for length in group]
        return sum(lengths) / len(lengths)

    def cut(self, longest: int) -> Recorded:
        """Return the lengths of the same responses where each is cut at `longest` tokens."""
        return Recorded(groups=[[min(one, longest) for one in group] for group in self.groups])

    def draw(self, rng: np.random.Generator, *, groups: int, samples: int) -> np.ndarray:
        """Return [groups, samples] lengths; a group of another size is sampled with replacement."""
        drawn = np.empty((groups, samples), np.int64)
        for row, place in enumerate(rng.integers(len(self.groups), size=groups)):
            group = self.groups[place]
            whole = len(group) == samples
            drawn[row] = group if whole else rng.choice(np.asarray(group), size=samples)
        return np.maximum(drawn, 1)
