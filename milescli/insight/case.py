"""What a diagnosis looks at: a run's history, what is known of it, and its newest samples."""

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
    """What is learned is spoiled, or will be."""
    WARNING = "warning"
    """Learning or speed is lost."""
    HINT = "hint"
    """It could be faster; nothing is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One named diagnosis of a run."""

    name: str
    """Stable, with hyphens: `entropy-collapse`; `docs/verdict.md` has a heading for each."""
    level: Level
    title: str
    """In a few words, without figures: Entropy collapses."""
    evidence: str
    """What was seen, with figures and steps."""
    advice: tuple[str, ...]
    """What to try, the likeliest first; `--set key=value` where a key does it."""
    source: str
    """Where the rule comes from: a paper with its section, or how it is derived."""
    columns: tuple[str, ...]
    """Names of metrics.jsonl that show it."""
    steps: tuple[int, int] | None = None
    """First and last step of what was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Holds the judgement of a run."""

    step: int
    """Steps done."""
    headline: str
    """One sentence: is it learning, and if not, why?"""
    is_learning: bool | None
    """True if the reward (or the loss on rows) improves; None: too early to say."""
    findings: Sequence[Finding] = ()
    """The worst first; empty: nothing is wrong."""
    facts: Sequence[str] = field(default=())
    """What is normal and looks odd: loss near 0 at strictly on-policy steps."""

    @property
    def level(self) -> Level | None:
        """The level of the worst finding; None: nothing is wrong."""
        return self.findings[0].level if self.findings else None

    @property
    def is_healthy(self) -> bool:
        """Return True if no finding is worse than a hint."""
        return self.level in (None, Level.HINT)


FEW_STEPS = 8
"""Fewer, and a figure's course says nothing."""
EARLY_SHARE, EARLY_MOST = 0.1, 100
"""A run that has done so little of what it is to do, in steps at most, has not shown yet whether
its figures rise: a recipe of 1,000 steps learns more slowly than one of 20."""
CEILING = 0.95
"""A reward or an accuracy of 0 to 1 that is at least so high has little left to gain."""
REWARD, LOSS = "rollout/reward_mean", "train/loss"


@dataclass(frozen=True)
class Case:
    """What the diagnoses of one run look at."""

    history: History
    facts: RunFacts = field(default_factory=RunFacts)
    samples: Sequence[KeptSample] = ()
    """Samples of the newest steps."""
    first_samples: Sequence[KeptSample] = ()
    """Samples of the first step that has any."""
    now_s: float | None = None
    """Seconds since 1970, where the run goes on; None: it does not, or that is not known."""
    memory: Mapping[str, Sequence[tuple[float, int]]] = field(default_factory=dict)
    """By process of the newest attempt: (seconds since 1970, resident bytes), in order."""

    @property
    def num_steps(self) -> int:
        """The number of steps that are known."""
        return len(self.history.columns)

    @property
    def steps(self) -> tuple[int, int]:
        """The numbers of the first and the last step."""
        known = self.history.columns.steps
        return (known[0], known[-1]) if known else (0, 0)

    @property
    def recent_steps(self) -> tuple[int, int]:
        """The first and the last step of the newest window."""
        known = self.history.columns.steps
        count = len(series.recent(range(len(known))))
        return (known[-count], known[-1]) if known else (0, 0)

    def column(self, name: str) -> np.ndarray:
        """Return [steps] values; NaN where a step has none."""
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
        """Return True if too few steps are done to say that a figure does not rise; `least` applies
        to any run."""
        planned = EARLY_SHARE * (self.history.num_steps or 0)
        return self.num_steps < max(least, min(planned, EARLY_MOST))

    @cached_property
    def progress(self) -> Trend:
        """Test the progress of the reward; for a run on rows, the fall of its loss."""
        values = -self.column(LOSS) if self.history.learns_from_rows else self.column(REWARD)
        return rise(values)

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


def rise(values: Sequence[float]) -> Trend:
    """Test a series that may rise fast and then stay: use the surer one of the line through the
    whole series and the change from its first steps to its last ones."""
    line, ends = series.trend(values), series.change(values)
    return max((line, ends), key=_sureness)


def difference(first: float, last: float, *, num_prompts: int) -> Trend:
    """Return the trend between two accuracies on the same number of prompts, as two independent
    shares."""
    shares = [min(max(value, 0.0), 1.0) for value in (first, last)]
    # Laplace's rule: none of 0 is no certainty
    smoothed = [(share * num_prompts + 1) / (num_prompts + 2) for share in shares]
    variance = sum(share * (1 - share) for share in smoothed) / max(num_prompts, 1)
    return Trend(change=last - first, error=math.sqrt(variance))


def _sureness(trend: Trend) -> float:
    if math.isnan(trend.change):
        return -1.0
    return abs(trend.change) / trend.error if trend.error > 0 else math.inf


def number(value: Any, form: str = ".3g") -> str:
    """Format a figure of the evidence."""
    return format(float(value), form)
