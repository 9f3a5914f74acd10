"""Compares two runs: differences in their settings, rewards and held-out results, each with its
uncertainty."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from milescli.report.evaluations import evaluation_files, rewards_by_prompt, settings_of_evaluation
from milescli.report.formats import (
    INTERVAL,
    NOTHING,
    accuracy,
    duration,
    figure,
    per_second,
    steps,
)
from milescli.report.series import (
    MIN_INDEPENDENT_STEPS,
    MIN_STEPS,
    MeanDifference,
    area,
    common_level,
    common_width,
    first_step_at,
    mean_difference,
    paired_differences,
    ratio_of_medians,
)
from milescli.report.subject import Subject
from milescli.rollout.evaluation.statistics import (
    LEVEL,
    Difference,
    compare_paired,
    describe_difference,
)

_NEVER = ("run.name", "run.dir", "name", "description")
"""Keys that do not affect training."""
OF_REWARD = ("rollout.reward", "rollout.reward_model", "rollout.generative", "rollout.rewards")
"""Keys whose difference makes the two rewards incomparable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDifference:
    """Describes one setting in which two runs differ."""

    what: str
    """recipe, plan, versions, machine or data."""
    name: str
    a: str
    b: str


def differences(a: Subject, b: Subject) -> list[SettingDifference]:
    """List the differences, the recipe first; empty if there are none."""
    found = [
        *_of("recipe", _keys(a), _keys(b)),
        *_of("data", a.data_words(), b.data_words()),
        *_of("versions", a.versions(), b.versions()),
        *_of("machine", {"machine": a.machine or NOTHING}, {"machine": b.machine or NOTHING}),
        *_of("plan", _decided(a), _decided(b)),
    ]
    return [one for one in found if one.name not in _NEVER]


def rewards_differ(found: list[SettingDifference]) -> list[str]:
    """Return the recipe keys whose difference makes the two rewards incomparable."""
    return [
        one.name
        for one in found
        if one.what == "recipe"
        and any(one.name == key or one.name.startswith(f"{key}.") for key in OF_REWARD)
    ]


def _of(what: str, a: Mapping[str, str], b: Mapping[str, str]) -> list[SettingDifference]:
    names = list(dict.fromkeys([*a, *b]))
    return [
        SettingDifference(what=what, name=name, a=a.get(name, NOTHING), b=b.get(name, NOTHING))
        for name in names
        if a.get(name) != b.get(name)
    ]


def _keys(subject: Subject) -> dict[str, str]:
    return {key.name: key.value for key in subject.keys}


def _decided(subject: Subject) -> dict[str, str]:
    return {one["key"]: one["value"] for one in subject.decisions()}


Files = Mapping[int, Path]
"""Step -> samples of its evaluation."""
NO_DIFFERENCE = "no difference that the data can show"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Holds the results of two runs on one set of prompts that both answered."""

    set: str
    """heldout: the runs' own prompts."""
    a_step: int
    b_step: int
    a_accuracy: float
    b_accuracy: float
    """Accuracy over the prompts that both answered."""
    num_other: int
    """Number of prompts that only one run answered."""
    asked_otherwise: Sequence[str]
    """Keys in which the two evaluations differ."""
    difference: Difference
    short: str
    """Text that names the better run, if both were evaluated with the same settings."""
    sentence: str
    """Text with the size of the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Holds the sample files of both runs for one set."""

    steps: tuple[int, int]
    files: tuple[Path, Path]
    asked_otherwise: Sequence[str]


def held_out_of(a: Subject, b: Subject, *, names: tuple[str, str]) -> list[HeldOut]:
    """Compare each set that both have evaluated, the runs' own prompts first: at the last step at
    which both were evaluated alike, else at the last of each."""
    of_a, of_b = evaluation_files(a.run), evaluation_files(b.run)
    recipes = a.facts.recipe, b.facts.recipe
    pairs = {
        name: _chosen(of_a[name], of_b[name], recipes=recipes)
        for name in sorted(of_a.keys() & of_b.keys())
    }
    found = (_held_out(name, pair, names=names) for name, pair in pairs.items())
    return [one for one in found if one is not None]


def _chosen(of_a: Files, of_b: Files, *, recipes: Sequence[Mapping[str, Any]]) -> _Pair:
    common = [(step, step) for step in sorted(of_a.keys() & of_b.keys(), reverse=True) if step]
    pairs = []
    for at in [*common, (max(of_a), max(of_b))]:  # at step 0 nothing was learned
        files = of_a[at[0]], of_b[at[1]]
        one, other = map(settings_of_evaluation, files, recipes)
        otherwise = [key for key in one if one[key] != other[key]]
        pairs.append(_Pair(steps=at, files=files, asked_otherwise=otherwise))
    return next((pair for pair in pairs if not pair.asked_otherwise), pairs[0])


def _held_out(name: str, pair: _Pair, *, names: tuple[str, str]) -> HeldOut | None:
    one, other = map(rewards_by_prompt, pair.files)
    keys = [key for key in one if key in other]
    if not keys:
        return None
    rewards = [one[key] for key in keys], [other[key] for key in keys]
    difference = compare_paired(*rewards)
    what = f"`{name}`" if name else "Held-out prompts"
    at = pair.steps
    where = f"{what} at step{f' {at[0]}' if at[0] == at[1] else f's {at[0]} and {at[1]}'}"
    otherwise = ", ".join(pair.asked_otherwise)
    return HeldOut(
        set=name or "heldout",
        a_step=at[0],
        b_step=at[1],
        a_accuracy=math.fsum(rewards[0]) / len(keys),
        b_accuracy=math.fsum(rewards[1]) / len(keys),
        num_other=len(one) + len(other) - 2 * len(keys),
        asked_otherwise=pair.asked_otherwise,
        difference=difference,
        short=f"{where}: {_held_out_winner(difference, names, otherwise=otherwise)}",
        sentence=f"{where}{f', with different {otherwise}' if otherwise else ''}: "
        + describe_difference(difference, a=names[0], b=names[1]),
    )


def _held_out_winner(difference: Difference, names: tuple[str, str], *, otherwise: str) -> str:
    if otherwise:
        return f"the two were evaluated with different settings: {otherwise}."
    if difference.p_value >= 1 - LEVEL:
        return f"{NO_DIFFERENCE}."
    winner = names[0] if difference.estimate.value > 0 else names[1]
    return f"the two runs differ: {winner} scores higher."


ONE_EACH = (
    "This is one run of each: the tests say whether these two runs differ, not which recipe is "
    "better. For that, run each with several seeds: miles compare A1 A2 A3 -- B1 B2 B3"
)
_BY = (
    "by a t-test of the mean difference whose variance takes in that neighbouring steps are alike "
    "(prewhitened EWC; Lazarus, Lewis, Stock and Watson 2018)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveComparison:
    """Compares reward (or loss) of two runs over the steps that both have done."""

    name: str
    """Name of the metric in metrics.jsonl."""
    word: str
    """reward or loss."""
    num_steps: int
    difference: MeanDifference | None
    """A minus B; None if there are too few steps."""
    a_area: float
    b_area: float
    """Area under the curve, as a mean height over the common steps."""
    level: float | None
    """Level that both runs reach."""
    a_reached: int | None
    b_reached: int | None
    """Step at which each run reaches the level."""
    short: str
    """Names the better run."""
    sentence: str
    """Says by how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds per step of A divided by those of B: below 1 A is faster."""

    ratio: float
    """Geometric mean over the common steps; with few steps, ratio of the medians."""
    low: float | None
    high: float | None
    """Upper end of the LEVEL interval."""
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsCompared:
    """Holds the comparison of two runs."""

    a: Subject
    b: Subject
    a_name: str
    b_name: str
    differing: Sequence[SettingDifference]
    curve: CurveComparison | None
    held_out: Sequence[HeldOut]
    """The runs' own held-out prompts first."""
    speed: Speed | None
    notes: Sequence[str]
    """What was not compared, and the reasons."""

    @property
    def has_rows(self) -> bool:
        """Return True if one of the runs trains on rows, so that its loss shows its progress."""
        return self.a.learns_from_rows or self.b.learns_from_rows

    @property
    def headline(self) -> str:
        """Return a sentence or two, without numbers."""
        parts = [one.short for one in self.held_out[:1]]
        parts += [self.curve.short] if self.curve is not None else []
        if parts:
            return " ".join(parts)
        if self.notes[0] != ONE_EACH:
            return self.notes[0]
        return "Nothing can be compared: the two runs have no common steps or evaluations."

    @property
    def is_significant(self) -> bool:
        """Return True if some difference is more than chance."""
        p_values = [one.difference.p_value for one in self.held_out[:1] if not one.asked_otherwise]
        if self.curve is not None and self.curve.difference is not None:
            p_values.append(self.curve.difference.p_value)
        return any(p_value < 1 - LEVEL for p_value in p_values)

    @property
    def sentences(self) -> list[str]:
        """Return the sentences with numbers: held-out prompts, curve, speed."""
        parts = [*self.held_out, self.curve, self.speed]
        return [one.sentence for one in parts if one is not None]


def compare(a: Subject, b: Subject) -> RunsCompared:
    """Compare run A with run B."""
    same = a.name == b.name
    names = (f"{a.name} (A)", f"{b.name} (B)") if same else (a.name, b.name)
    differing = differences(a, b)
    notes, curve, held_out = list[str](), None, list[HeldOut]()
    if keys := rewards_differ(differing):
        notes.append(
            "Rewards were not compared: the two runs were scored differently, by "
            f"{', '.join(keys)}."
        )
    else:
        held_out = held_out_of(a, b, names=names)
        if a.learns_from_rows == b.learns_from_rows:
            curve = _curve(a, b, names=names)
        else:
            notes.append("Curves were not compared: one learns from rows, the other by rollouts.")
    if a.adapters or b.adapters:
        notes.append(
            "with several adapters, each adapter is a run: miles report A/adapters/X B/adapters/X"
        )
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
    steps, gains = paired_differences(of_a, of_b)
    if not steps:
        return None
    difference = mean_difference(gains)
    level, width = common_level(of_a, of_b, rises=rises), common_width(of_a, of_b)
    reached = [
        None if level is None else first_step_at(one, level, rises=rises, width=width)
        for one in (of_a, of_b)
    ]
    return CurveComparison(
        name=a.curve,
        word=word,
        num_steps=len(steps),
        difference=difference,
        a_area=area(of_a, steps),
        b_area=area(of_b, steps),
        level=level,
        a_reached=reached[0],
        b_reached=reached[1],
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
            f"The {word} of {num_steps} common steps was not tested: at least {MIN_STEPS} "
            f"steps are needed, and as much as {MIN_INDEPENDENT_STEPS} independent ones; "
            "neighbouring steps are alike."
        )
    return (
        f"{word.capitalize()} of {names[0]} less that of {names[1]}: {difference.value:+.3f} on "
        f"the mean of {num_steps:,} common steps ({INTERVAL} {difference.low:+.3f} to "
        f"{difference.high:+.3f}); p = {difference.p_value:.2g} {_BY}."
    )


def _winner(difference: MeanDifference | None, *, rises: bool, names: tuple[str, str]) -> str:
    if difference is None:
        return "too few steps, or too much alike, for a conclusion."
    if not difference.is_significant:
        return f"{NO_DIFFERENCE}."
    winner = names[0] if (difference.value > 0) == rises else names[1]
    return f"the two runs differ: {winner} is {'higher' if rises else 'lower'}."


def _speed(a: Subject, b: Subject, *, names: tuple[str, str]) -> Speed | None:
    of_a, of_b = _by_step(a, "time/step_s"), _by_step(b, "time/step_s")
    logs = [
        {step: math.log(value) for step, value in one.items() if value > 0} for one in (of_a, of_b)
    ]
    difference = mean_difference(paired_differences(*logs)[1])
    low = high = None
    before, after = "", ", by their medians"
    if difference is None:
        ratio = ratio_of_medians([*of_a.values()], [*of_b.values()])
    else:
        ratio, low, high = map(math.exp, (difference.value, difference.low, difference.high))
        before = "" if difference.is_significant else f"Speed: {NO_DIFFERENCE}. "
        after = f" ({INTERVAL} {low:.2f} to {high:.2f})"
    if ratio is None:
        return None
    words = f"A step of {names[0]} takes {ratio:.2f} times as long as one of {names[1]}"
    return Speed(ratio=ratio, low=low, high=high, sentence=f"{before}{words}{after}.")


def _by_step(subject: Subject, name: str) -> Mapping[int, float]:
    return dict(subject.points(name))


ALIKE = "Recipe, data, versions, machine and plan are the same."


def compare_figures(compared: RunsCompared) -> dict[str, Any]:
    """Return the comparison as JSON values, for programs."""
    return {
        "a": compared.a_name,
        "b": compared.b_name,
        "headline": compared.headline,
        "differing": [asdict(one) for one in compared.differing],
        "curve": None if compared.curve is None else asdict(compared.curve),
        "held_out": [asdict(one) for one in compared.held_out],
        "speed": None if compared.speed is None else asdict(compared.speed),
        "notes": list(compared.notes),
    }


def figure_rows(compared: RunsCompared) -> Iterator[tuple[str, str, str]]:
    """Yield rows of a table: name, value of the first run, value of the second."""
    both = compared.a.summary, compared.b.summary
    yield ("step", *map(steps, both))
    for word, courses, form in (
        ("reward", [one.reward for one in both], figure),
        ("loss", [one.loss for one in both] if compared.has_rows else [], figure),
        ("accuracy", [one.accuracy for one in both], accuracy),
    ):
        if any(courses):
            yield (f"{word}, last", *(form(one.last) if one else NOTHING for one in courses))
            yield (f"{word}, best", *(form(one.best) if one else NOTHING for one in courses))
    for one in compared.held_out:
        yield (
            f"{one.set}, {one.difference.num_prompts:,} shared prompts",
            f"{accuracy(one.a_accuracy)} (step {one.a_step})",
            f"{accuracy(one.b_accuracy)} (step {one.b_step})",
        )
    if (curve := compared.curve) is not None:
        yield (
            f"mean {curve.word} of {curve.num_steps:,} common steps",
            figure(curve.a_area),
            figure(curve.b_area),
        )
        if curve.level is not None:
            yield (
                f"step that reaches {curve.word} {figure(curve.level)}",
                _step(curve.a_reached),
                _step(curve.b_reached),
            )
    yield ("took", *(duration(one.elapsed_s) for one in both))
    for what, speeds in (
        ("rollout", [one.rollout_tokens_per_s for one in both]),
        ("train", [one.train_tokens_per_s for one in both]),
    ):
        if any(speeds):
            yield (f"{what} tokens/s", *map(per_second, speeds))


def _step(step: int | None) -> str:
    return NOTHING if step is None else f"{step:,}"
