"""Defines the input of a diagnosis: a run's history, its facts, and its newest samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from milescli.core.history import History
from milescli.insight import series
from milescli.insight.facts import RunFacts
from milescli.insight.samples import KeptSample
from milescli.insight.series import Trend


class Level(StrEnum):
    """Names the severity of a finding."""

    BAD = "bad"
    """Training is harmed, or will be."""
    WARNING = "warning"
    """Learning or speed is lost."""
    HINT = "hint"
    """The run could be faster; nothing is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Describes one named diagnosis of a run."""

    name: str
    """Stable name with hyphens: `entropy-collapse`; `docs/verdict.md` has a heading for each."""
    level: Level
    title: str
    """A few words without numbers: Entropy collapses."""
    evidence: str
    """What was observed, with numbers and steps."""
    advice: tuple[str, ...]
    """What to try, the most likely first; `--set key=value` if a key does it."""
    source: str
    """Source of the rule: a paper with its section, or a derivation."""
    columns: tuple[str, ...]
    """Names in metrics.jsonl that show it."""
    steps: tuple[int, int] | None = None
    """First and last step of the observation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Holds the judgement of a run."""

    step: int
    """The last step."""
    num_steps: int
    """Number of steps with metrics: fewer than `step` after a fork, which begins in mid-run."""
    headline: str
    """One sentence: is it learning, and if not, why?"""
    is_learning: bool | None
    """True if the reward (or the loss on rows) improves; None: too early to say."""
    findings: Sequence[Finding] = ()
    """The worst first; empty: nothing is wrong."""
    facts: Sequence[str] = field(default=())
    """Normal observations that look odd: loss near 0 at strictly on-policy steps."""

    @property
    def level(self) -> Level | None:
        """Return the level of the worst finding; None: nothing is wrong."""
        return self.findings[0].level if self.findings else None

    @property
    def is_healthy(self) -> bool:
        """Return True if no finding is worse than a hint."""
        return self.level in (None, Level.HINT)


FEW_STEPS = 8
"""With fewer steps, a metric has no trend."""
EARLY_SHARE, EARLY_MOST = 0.1, 100
"""A run that has done less than this share of its steps, and at most this many steps, has not shown
yet whether its metrics rise: a recipe of 1,000 steps learns more slowly than one of 20."""
CEILING = 0.95
"""A reward or an accuracy of 0 to 1 that is at least this high can hardly improve."""
REWARD, LOSS = "rollout/reward_mean", "train/loss"


@dataclass(frozen=True)
class Case:
    """Holds the data that the diagnoses of one run read."""

    history: History
    facts: RunFacts = field(default_factory=RunFacts)
    samples: Sequence[KeptSample] = ()
    """Samples of the newest steps."""
    first_samples: Sequence[KeptSample] = ()
    """Samples of the first step that has any."""
    now_s: float | None = None
    """Seconds since 1970 if the run is running; None: it is not, or that is unknown."""
    memory: Mapping[str, Sequence[tuple[float, int]]] = field(default_factory=dict)
    """Process of the newest attempt -> (seconds since 1970, resident bytes), in order."""

    @property
    def num_steps(self) -> int:
        """Return the number of steps with metrics."""
        return len(self.history.columns)

    @property
    def steps(self) -> tuple[int, int]:
        """Return the numbers of the first and the last step."""
        known = self.history.columns.steps
        return (known[0], known[-1]) if known else (0, 0)

    @property
    def recent_steps(self) -> tuple[int, int]:
        """Return the first and the last step of the newest window."""
        known = self.history.columns.steps
        count = len(series.recent(range(len(known))))
        return (known[-count], known[-1]) if known else (0, 0)

    def column(self, name: str) -> np.ndarray:
        """Return [steps] values; NaN for a step without one."""
        return np.frombuffer(self.history.columns.get(name), dtype=np.float64)

    def early(self, name: str) -> float:
        """Return the mean of the metric over the first steps."""
        return series.mean(series.early(self.column(name)))

    def recent(self, name: str) -> float:
        """Return the mean of the metric over the last steps."""
        return series.mean(series.recent(self.column(name)))

    def has(self, name: str, *, least: int = FEW_STEPS) -> bool:
        """Return True if at least `least` steps recorded the metric."""
        return int(np.isfinite(self.column(name)).sum()) >= least

    def is_early(self, *, least: int) -> bool:
        """Return True if too few steps are done to say that a metric does not rise. `least`:
        smallest number of steps for any run."""
        planned = EARLY_SHARE * (self.history.num_steps or 0)
        return self.num_steps < max(least, min(planned, EARLY_MOST))

    @cached_property
    def progress(self) -> Trend:
        """Return the trend of the reward; for a run on rows, that of the negative loss."""
        values = -self.column(LOSS) if self.history.learns_from_rows else self.column(REWARD)
        return surest_trend(values)

    @cached_property
    def accuracy(self) -> Trend:
        """Return the trend of held-out accuracy, from the first evaluation to the best; its error
        follows from the number of prompts."""
        found = self.history.evaluations
        if len(found) < 2:
            return Trend(change=math.nan, error=math.nan)
        best = max(found[1:], key=lambda one: one.accuracy)
        return difference(found[0].accuracy, best.accuracy, num_prompts=best.num_prompts)

    @property
    def is_bounded(self) -> bool:
        """Return True if all mean rewards are in 0..1."""
        rewards = series.finite(self.column(REWARD))
        return bool(len(rewards)) and bool(((rewards >= 0) & (rewards <= 1)).all())

    @property
    def is_at_ceiling(self) -> bool:
        """Return True if the reward can hardly improve further."""
        return self.is_bounded and self.recent(REWARD) >= CEILING

    @property
    def is_rising(self) -> bool:
        """Return True if reward or held-out accuracy improved by more than noise."""
        return self.progress.is_rising or self.accuracy.is_rising

    def finding(
        self,
        name: str,
        level: Level,
        title: str,
        *,
        evidence: str,
        advice: Sequence[str],
        source: str,
        columns: Sequence[str],
        steps: tuple[int, int] | None = None,
    ) -> Finding:
        """Make a finding about the newest steps, unless other steps are given."""
        return Finding(
            name=name,
            level=level,
            title=title,
            evidence=evidence,
            advice=tuple(advice),
            source=source,
            columns=tuple(columns),
            steps=steps or self.recent_steps,
        )


def surest_trend(values: Sequence[float]) -> Trend:
    """Return the trend of a series that may rise fast and then level off: the more significant one
    of the line through the whole series and the change from its first steps to its last ones."""
    line, ends = series.trend(values), series.change(values)
    return max((line, ends), key=_standard_errors)


def difference(first: float, last: float, *, num_prompts: int) -> Trend:
    """Return the trend between two accuracies on the same number of prompts, as two independent
    shares."""
    shares = [min(max(value, 0.0), 1.0) for value in (first, last)]
    # Laplace's rule: none of 0 is no certainty
    smoothed = [(share * num_prompts + 1) / (num_prompts + 2) for share in shares]
    variance = sum(share * (1 - share) for share in smoothed) / max(num_prompts, 1)
    return Trend(change=last - first, error=math.sqrt(variance))


def _standard_errors(trend: Trend) -> float:
    if math.isnan(trend.change):
        return -1.0
    return abs(trend.change) / trend.error if trend.error > 0 else math.inf


def number(value: Any, form: str = ".3g") -> str:
    """Format a number of the evidence."""
    return format(float(value), form)
