"""Compares two recipes, each of which ran with several seeds. One number of each run counts, so
that the test includes the spread between seeds, which a comparison of two runs step by step does
not (`compare.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, pvariance

from milescli.core.errors import MilesError
from milescli.recipe.data_files import TASK_PREFIX
from milescli.report.compare import differences, rewards_differ
from milescli.report.evaluations import evaluation_files, settings_of_evaluation
from milescli.report.formats import INTERVAL, accuracy, figure
from milescli.report.series import area
from milescli.report.subject import Subject
from milescli.rollout.evaluation.statistics import LEVEL, Estimate, t_quantile, two_sided_p

MIN_RUNS = 2
"""Smallest number of runs of a side; one run has no spread."""
_SEED = "run.seed"
_PLACES = ("run.name", "run.dir", "name", "description", _SEED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Holds one number of each run, and the comparison of the two sides."""

    name: str
    a: Sequence[float]
    b: Sequence[float]
    """One number for each run, in the order they were named."""
    difference: Estimate
    """Mean of A minus mean of B."""
    p_value: float
    """By Welch's t-test (Welch 1947, Biometrika 34:28)."""
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SidesCompared:
    """Holds the comparison of two recipes."""

    a_runs: Sequence[str]
    b_runs: Sequence[str]
    measures: Sequence[Measure]
    notes: Sequence[str]
    """What was not compared, and what weakens the comparison."""


def compare_sides(a: Sequence[Subject], b: Sequence[Subject]) -> SidesCompared:
    """Compare the runs of recipe A with those of recipe B. Raises MilesError if a side has fewer
    than FEWEST_RUNS, or one run is on both."""
    for side, runs in (("before", a), ("after", b)):
        if len(runs) < MIN_RUNS:
            raise MilesError(
                f"only {len(runs)} run {side} `--`",
                why="which recipe is better shows in several seeds of each",
                fix="miles compare A1 A2 A3 -- B1 B2 B3",
            )
    places_a, places_b = ({str(one.run.path.resolve()) for one in side} for side in (a, b))
    if twice := places_a & places_b:
        raise MilesError(
            f"the same run on both sides: {min(twice)}",
            why="a side holds the runs of one recipe",
            fix="miles compare A1 A2 A3 -- B1 B2 B3",
        )
    measures, notes = list[Measure](), [*_notes("A", a), *_notes("B", b)]
    if keys := rewards_differ(differences(a[0], b[0])):
        notes.append(f"rewards were not compared: they mean different things, by {', '.join(keys)}")
    else:
        measures += [one for one in (_held_out(a, b, notes), _curve(a, b, notes)) if one]
    seconds = [[_step_seconds(one) for one in side] for side in (a, b)]
    if all(map(all, seconds)):
        measures.append(_measure("seconds per step, median", *seconds, better=None))
    return SidesCompared(
        a_runs=[one.name for one in a],
        b_runs=[one.name for one in b],
        measures=measures,
        notes=notes,
    )


def _notes(side: str, runs: Sequence[Subject]) -> list[str]:
    """Return what weakens the claim that these runs are seeds of one recipe."""
    notes = list[str]()
    seeds = [next((key.value for key in one.keys if key.name == _SEED), "") for one in runs]
    if len({*seeds}) < len(seeds):
        notes.append(f"runs of {side} have equal seeds, so their spread is too small")
    others = (differences(runs[0], other) for other in runs[1:])
    keys = {one.name for found in others for one in found if one.what == "recipe"}
    if keys := sorted(keys.difference(_PLACES)):
        notes.append(f"runs of {side} differ in more than the seed: {', '.join(keys)}")
    return notes


def _held_out(a: Sequence[Subject], b: Sequence[Subject], notes: list[str]) -> Measure | None:
    """Compare the accuracy at the last step at which all runs were evaluated."""
    runs = [*a, *b]
    if len({_held_out_set(run) for run in runs} - {""}) > 1:
        notes.append("held-out prompts were not compared: different files")
        return None
    common = set.intersection(*({one.step for one in run.history.evaluations} for run in runs))
    if not common:
        notes.append("held-out prompts were not compared: no step at which all runs evaluated")
        return None
    step = max(common)
    files = [(evaluation_files(run.run).get("", {}).get(step), run.facts.recipe) for run in runs]
    settings = [settings_of_evaluation(file, recipe) for file, recipe in files if file is not None]
    if any(one != settings[0] for one in settings):
        notes.append("held-out prompts were not compared: evaluated with different settings")
        return None
    of_a, of_b = (
        [one.accuracy for run in side for one in run.history.evaluations if one.step == step]
        for side in (a, b)
    )
    return _measure(f"held-out accuracy, step {step}", of_a, of_b, better="higher")


def _held_out_set(run: Subject) -> str:
    """Return what identifies a run's held-out prompts: the generated task, of which each seed has
    other rows, or the content of the files; empty if unknown."""
    named = next((key.value for key in run.keys if key.name == "data.eval"), "")
    return (
        named
        if named.startswith(TASK_PREFIX)
        else str(run.data().get("eval", {}).get("sha256", ""))
    )


def _curve(a: Sequence[Subject], b: Sequence[Subject], notes: list[str]) -> Measure | None:
    """Compare the mean height of reward or loss over the steps that all runs have done."""
    runs = [*a, *b]
    if len({one.curve for one in runs}) > 1:
        notes.append("curves were not compared: some runs learn from rows, others by rollouts")
        return None
    values = [dict(one.points(one.curve)) for one in runs]
    steps = sorted(set.intersection(*map(set, values)))
    if not steps:
        notes.append("curves were not compared: no common step")
        return None
    means = [area(one, steps) for one in values]
    word, better = ("loss", "lower") if runs[0].learns_from_rows else ("reward", "higher")
    name = f"mean {word} of {len(steps):,} steps"
    return _measure(name, means[: len(a)], means[len(a) :], better=better)


def _step_seconds(run: Subject) -> float:
    values = [value for _, value in run.points("time/step_s")]
    return median(values) if values else 0.0


def _measure(name: str, a: Sequence[float], b: Sequence[float], *, better: str | None) -> Measure:
    """Compare the two sides. `better`: higher or lower, if one of them is."""
    value = fmean(a) - fmean(b)
    errors = [pvariance(one) / (len(one) - 1) for one in (a, b)]  # variance of a mean
    if not (error := math.sqrt(sum(errors))):
        difference = Estimate(value=value, low=value, high=value)
        words = "all runs agree" if not value else "no spread between seeds, so nothing was tested"
        return Measure(
            name=name, a=a, b=b, difference=difference, p_value=1.0, sentence=f"{name}: {words}"
        )
    weights = (each**2 / (len(one) - 1) for each, one in zip(errors, (a, b), strict=True))
    freedom = max(1, int(sum(errors) ** 2 / sum(weights)))  # rounded down: a wider interval
    half = t_quantile(0.5 + LEVEL / 2, freedom) * error
    p_value = two_sided_p(value / error, freedom)
    difference = Estimate(value=value, low=value - half, high=value + half)
    return Measure(
        name=name,
        a=a,
        b=b,
        difference=difference,
        p_value=p_value,
        sentence=f"{name}: {_verdict(value, p_value, better=better)}",
    )


def _verdict(value: float, p_value: float, *, better: str | None) -> str:
    if p_value >= 1 - LEVEL:
        return "no difference that these seeds can show"
    if better is None:
        return f"{'A' if value < 0 else 'B'} is faster"
    return f"{'A' if (value > 0) == (better == 'higher') else 'B'} is better"


def rows(compared: SidesCompared) -> list[list[str]]:
    """Return a table: measure, A, B (mean and range), difference with its interval, p."""
    lines = []
    for one in compared.measures:
        is_share = "accuracy" in one.name and all(0.0 <= end <= 1.0 for end in (*one.a, *one.b))
        form = accuracy if is_share else figure
        sides = (f"{form(fmean(s))} ({form(min(s))} to {form(max(s))})" for s in (one.a, one.b))
        scale, unit = (100, " points") if is_share else (1, "")
        value, low, high = (
            f"{scale * end:+.3g}"
            for end in (one.difference.value, one.difference.low, one.difference.high)
        )
        lines.append([one.name, *sides, f"{value}{unit} ({low} to {high})", f"{one.p_value:.2g}"])
    return lines


COLUMNS = ["", "A: mean (range)", "B", f"A less B ({INTERVAL})", "p"]
