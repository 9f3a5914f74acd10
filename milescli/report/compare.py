"""Two runs held against each other: what differs, and whether what came of it differs by more than
chance. Pure but for the samples of evaluations, which are read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from milescli.report.charts import column
from milescli.report.differ import Differing, differences, rewards_differ
from milescli.report.formats import INTERVAL
from milescli.report.held_out import NO_DIFFERENCE, HeldOut, held_out_of
from milescli.report.series import (
    FEWEST_STEPS,
    MeanDifference,
    area,
    common_level,
    mean_difference,
    paired,
    ratio_of_medians,
    reached,
)
from milescli.report.subject import Subject
from milescli.rollout.evaluation.statistics import LEVEL

ONE_EACH = (
    "This is one run of each: the tests say whether these two runs differ, not whether two others "
    "with other seeds would."
)
_BY = (
    "by a t-test of the mean difference whose variance takes in that neighbouring steps are alike "
    "(prewhitened EWC; Lazarus, Lewis, Stock and Watson 2018)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveComparison:
    """Reward (or loss) over the steps that both have done."""

    name: str
    """Of metrics.jsonl."""
    word: str
    """reward or loss."""
    num_steps: int
    difference: MeanDifference | None
    """A less B; None where there are too few steps."""
    a_area: float
    b_area: float
    """Under the curve, as a mean height over the common steps."""
    level: float | None
    """That both reach."""
    a_reached: int | None
    b_reached: int | None
    """Step at which each does."""
    short: str
    """Who is better."""
    sentence: str
    """And by how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds of a step, A by B: under 1 A is faster."""

    ratio: float
    """Geometric mean over the common steps; of few steps that of the medians."""
    low: float | None
    high: float | None
    """Of the LEVEL interval."""
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsCompared:
    """All of it."""

    a: Subject
    b: Subject
    a_name: str
    b_name: str
    differing: Sequence[Differing]
    curve: CurveComparison | None
    held_out: Sequence[HeldOut]
    """The runs' own held-out prompts first."""
    speed: Speed | None
    notes: Sequence[str]
    """What was not compared, and why."""

    @property
    def has_rows(self) -> bool:
        """One of them learns from rows, so that its loss says how it goes."""
        return self.a.learns_from_rows or self.b.learns_from_rows

    @property
    def headline(self) -> str:
        """A sentence or two, without figures."""
        parts = [one.short for one in self.held_out[:1]]
        parts += [self.curve.short] if self.curve is not None else []
        if parts:
            return " ".join(parts)
        if self.notes[0] != ONE_EACH:
            return self.notes[0]
        return "Nothing can be compared: the two have no steps and no evaluations in common."

    @property
    def is_seen(self) -> bool:
        """Some difference is more than chance."""
        p_values = [one.difference.p_value for one in self.held_out[:1] if not one.asked_otherwise]
        if self.curve is not None and self.curve.difference is not None:
            p_values.append(self.curve.difference.p_value)
        return any(p_value < 1 - LEVEL for p_value in p_values)

    @property
    def sentences(self) -> list[str]:
        """With figures: held-out prompts, curve, speed."""
        parts = [*self.held_out, self.curve, self.speed]
        return [one.sentence for one in parts if one is not None]


def compare(a: Subject, b: Subject) -> RunsCompared:
    """A against B."""
    same = a.name == b.name
    names = (f"{a.name} (A)", f"{b.name} (B)") if same else (a.name, b.name)
    differing = differences(a, b)
    notes, curve, held_out = list[str](), None, list[HeldOut]()
    if keys := rewards_differ(differing):
        notes.append(
            f"Rewards were not compared: the two were scored otherwise, by {', '.join(keys)}."
        )
    else:
        held_out = held_out_of(a, b, names=names)
        if a.learns_from_rows == b.learns_from_rows:
            curve = _curve(a, b, names=names)
        else:
            notes.append("Curves were not compared: one learns from rows, the other by rollouts.")
    if a.adapters or b.adapters:
        notes.append("Of several adapters each is a run: miles report A/adapters/X B/adapters/X")
    return RunsCompared(
        a=a,
        b=b,
        a_name=names[0],
        b_name=names[1],
        differing=differing,
        curve=curve,
        held_out=held_out,
        speed=_speed(a, b, names=names),
        notes=[*notes, ONE_EACH],
    )


def _curve(a: Subject, b: Subject, *, names: tuple[str, str]) -> CurveComparison | None:
    rises = not a.learns_from_rows
    word = "reward" if rises else "loss"
    of_a, of_b = _by_step(a, a.curve), _by_step(b, b.curve)
    steps, gains = paired(of_a, of_b)
    if not steps:
        return None
    difference = mean_difference(gains)
    level = common_level(of_a, of_b, rises=rises)
    return CurveComparison(
        name=a.curve,
        word=word,
        num_steps=len(steps),
        difference=difference,
        a_area=area(of_a, steps),
        b_area=area(of_b, steps),
        level=level,
        a_reached=None if level is None else reached(of_a, level, rises=rises),
        b_reached=None if level is None else reached(of_b, level, rises=rises),
        short=f"{word.capitalize()}: {_winner(difference, rises=rises, names=names)}",
        sentence=_curve_words(difference, num_steps=len(steps), word=word, names=names),
    )


def _curve_words(
    difference: MeanDifference | None,
    *,
    num_steps: int,
    word: str,
    names: tuple[str, str],
) -> str:
    if difference is None:
        return (
            f"The {word} of {num_steps} common steps was not tested: {FEWEST_STEPS} are the fewest "
            "that say anything."
        )
    return (
        f"{word.capitalize()} of {names[0]} less that of {names[1]}: {difference.value:+.3f} on "
        f"the mean of {num_steps:,} common steps ({INTERVAL} {difference.low:+.3f} to "
        f"{difference.high:+.3f}); p = {difference.p_value:.2g} {_BY}."
    )


def _winner(difference: MeanDifference | None, *, rises: bool, names: tuple[str, str]) -> str:
    if difference is None:
        return "too few steps to say."
    if not difference.is_seen:
        return f"{NO_DIFFERENCE}."
    return f"{names[0] if (difference.value > 0) == rises else names[1]} is better."


def _speed(a: Subject, b: Subject, *, names: tuple[str, str]) -> Speed | None:
    of_a, of_b = _by_step(a, "time/step_s"), _by_step(b, "time/step_s")
    logs = [
        {step: math.log(value) for step, value in one.items() if value > 0} for one in (of_a, of_b)
    ]
    difference = mean_difference(paired(*logs)[1])
    low = high = None
    before, after = "", ", by their medians"
    if difference is None:
        ratio = ratio_of_medians([*of_a.values()], [*of_b.values()])
    else:
        ratio, low, high = map(math.exp, (difference.value, difference.low, difference.high))
        before = "" if difference.is_seen else f"Speed: {NO_DIFFERENCE}. "
        after = f" ({INTERVAL} {low:.2f} to {high:.2f})"
    if ratio is None:
        return None
    words = f"A step of {names[0]} takes {ratio:.2f} times as long as one of {names[1]}"
    return Speed(ratio=ratio, low=low, high=high, sentence=f"{before}{words}{after}.")


def _by_step(subject: Subject, name: str) -> Mapping[int, float]:
    return {int(step): value for step, value in column(subject.history, name)}
