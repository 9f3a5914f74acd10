"""Two runs on the same held-out prompts: which evaluations of them can be held against each other,
and what the paired test of `miles eval --against` says. Reads the samples that lie in `eval/`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milescli.report.evaluations import asked_by, evaluation_files, rewards_by_prompt
from milescli.report.subject import Subject
from milescli.rollout.evaluation.statistics import LEVEL, Difference, compared, in_words

Files = Mapping[int, Path]
"""Step -> samples of its evaluation."""
NO_DIFFERENCE = "no difference that the data can show"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One set of prompts that both were asked."""

    set: str
    """heldout: the runs' own."""
    a_step: int
    b_step: int
    a_accuracy: float
    b_accuracy: float
    """Over the prompts that both were asked."""
    num_other: int
    """Prompts that only one was asked."""
    asked_otherwise: Sequence[str]
    """Keys by which the two were asked otherwise."""
    difference: Difference
    short: str
    """Who is better, where both were asked alike."""
    sentence: str
    """And by how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Samples of either run, of one set."""

    steps: tuple[int, int]
    files: tuple[Path, Path]
    asked_otherwise: Sequence[str]


def held_out_of(a: Subject, b: Subject, *, names: tuple[str, str]) -> list[HeldOut]:
    """Of each set that both have evaluated, the runs' own prompts first: at the last step at which
    both were asked alike, else at the last of each."""
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
    for steps in [*common, (max(of_a), max(of_b))]:  # at step 0 nothing was learned
        files = of_a[steps[0]], of_b[steps[1]]
        one, other = map(asked_by, files, recipes)
        otherwise = [key for key in one if one[key] != other[key]]
        pairs.append(_Pair(steps=steps, files=files, asked_otherwise=otherwise))
    return next((pair for pair in pairs if not pair.asked_otherwise), pairs[0])


def _held_out(name: str, pair: _Pair, *, names: tuple[str, str]) -> HeldOut | None:
    one, other = map(rewards_by_prompt, pair.files)
    keys = [key for key in one if key in other]
    if not keys:
        return None
    rewards = [one[key] for key in keys], [other[key] for key in keys]
    difference = compared(*rewards)
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
        short=f"{where}: {_winner(difference, names, otherwise=otherwise)}",
        sentence=f"{where}{f', asked otherwise by {otherwise}' if otherwise else ''}: "
        + in_words(difference, a=names[0], b=names[1]),
    )


def _winner(difference: Difference, names: tuple[str, str], *, otherwise: str) -> str:
    if otherwise:
        return f"the two were asked otherwise, by {otherwise}."
    if difference.p_value >= 1 - LEVEL:
        return f"{NO_DIFFERENCE}."
    return f"{names[0] if difference.estimate.value > 0 else names[1]} is better."
