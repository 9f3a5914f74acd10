"""What a verdict is made of: findings by name, each with its evidence, advice and source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

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
    """What is to be said of a run."""

    step: int
    """Steps done."""
    headline: str
    """One sentence: is it learning, and if not, why?"""
    is_learning: bool | None
    """Whether its reward (or its loss over rows) gets better; None: too early to say."""
    findings: Sequence[Finding] = ()
    """The worst first; empty: nothing is wrong."""
    facts: Sequence[str] = field(default=())
    """What is normal and looks odd: loss near 0 at strictly on-policy steps."""

    @property
    def level(self) -> Level | None:
        """Of the worst finding; None: nothing is wrong."""
        return self.findings[0].level if self.findings else None

    @property
    def is_healthy(self) -> bool:
        """No finding is worse than a hint."""
        return self.level in (None, Level.HINT)
