"""What a check of the visit says: one line for each figure, with what was predicted, what was
measured, and the bound that it is held to. Plain data, stdlib only; written by `checks/`, judged
here, shown by `visit.py` and `report.py`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Literal


class Verdict(StrEnum):
    """How a line ended."""

    OK = "ok"
    """Within its bound."""
    MISSED = "missed"
    """Outside its bound."""
    MEASURED = "measured"
    """It has no bound."""
    REHEARSED = "rehearsed"
    """Its bound is for an accelerator, and this is a CPU: the path ran, the figure says nothing."""
    SKIPPED = "skipped"
    """It cannot be had here; the note says why."""
    FAILED = "failed"
    """The check raised, or its process ended, before this line."""
    TIMEOUT = "timeout"
    """The check's limit passed before this line."""
    NOT_REACHED = "not reached"
    """The visit's time was spent before this check began."""

    @property
    def is_good(self) -> bool:
        """Nothing to mend."""
        return self in (Verdict.OK, Verdict.MEASURED, Verdict.REHEARSED, Verdict.SKIPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What a figure is held to."""

    kind: Literal["at most", "at least", "within", "at least of predicted", "equal"]
    value: float = 0.0
    anywhere: bool = True
    """False: only an accelerator is held to it."""

    def holds(self, measured: float, predicted: float | None) -> bool:
        """NaN holds nowhere."""
        if self.kind == "at most":
            return measured <= self.value
        if self.kind == "at least":
            return measured >= self.value
        assert predicted is not None, f"`{self.kind}` needs a prediction"
        if self.kind == "equal":
            return measured == predicted
        if self.kind == "within":
            return abs(measured - predicted) <= self.value * abs(predicted)
        return measured >= self.value * predicted

    def __str__(self) -> str:
        if self.kind == "equal":
            return "as predicted"
        if self.kind == "within":
            return f"within {self.value:.0%} of predicted"
        if self.kind == "at least of predicted":
            return f"at least {self.value:.0%} of predicted"
        return f"{self.kind} {self.value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure."""

    name: str
    """Within its check: `matmul_bf16`."""
    measured: float | None
    """None: it cannot be had here, and `note` says why."""
    unit: str
    """`TFLOP/s`, `tokens/s`, `bytes`, `s`, `relative error`, ..."""
    predicted: float | None = None
    """In the same unit: a data sheet's figure, the planner's, or the peer's in the same run."""
    bound: Bound | None = None
    note: str = ""
    """What a reader must know: the peer's name, the shape, the reason of a skip."""
    figures: dict[str, float] = field(default_factory=dict)
    """What the figure was made of, and what the planner takes from it: name with unit -> number."""

    def verdict(self, *, on_device: bool) -> Verdict:
        """On an accelerator, or on a CPU."""
        if self.measured is None:
            return Verdict.SKIPPED
        if self.bound is None:
            return Verdict.MEASURED
        if not (on_device or self.bound.anywhere):
            return Verdict.REHEARSED
        return Verdict.OK if self.bound.holds(self.measured, self.predicted) else Verdict.MISSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A line as the visit writes it."""

    check: str
    """`memory.qwen3-0.6b`"""
    name: str
    verdict: Verdict
    seconds: float
    """Since the line before it, or the start of the check's process."""
    unit: str = ""
    predicted: float | None = None
    measured: float | None = None
    bound: str = ""
    note: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, line: Line, *, check: str, seconds: float, on_device: bool) -> Record:
        """Judged."""
        return cls(
            check=check,
            name=line.name,
            verdict=line.verdict(on_device=on_device),
            seconds=round(seconds, 2),
            unit=line.unit,
            predicted=_finite(line.predicted),
            measured=_finite(line.measured),
            bound=str(line.bound or ""),
            note=line.note if line.measured is None or math.isfinite(line.measured) else "NaN",
            figures={name: value for name, value in line.figures.items() if math.isfinite(value)},
        )

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Record:
        """The inverse of `to_json`."""
        raw = json.loads(text)
        return cls(**{**raw, "verdict": Verdict(raw["verdict"])})


def _finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None
