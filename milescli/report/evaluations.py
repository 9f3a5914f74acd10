"""Reads evaluations of a run: accuracies with their intervals, and the rewards of each prompt, to
compare with another run's. Reads eval/*.jsonl and the results of `miles eval` next to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson

from milescli.checkpoint.run_dir import RunDir
from milescli.core.files import read_json, read_lines
from milescli.core.history import Evaluation, History
from milescli.rollout.evaluation.statistics import Estimate, estimate_mean

MAX_SHOWN = 12
"""Largest number of evaluations in a table; if there are more, the first, the last, and some
between."""
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""Exceptions of reading a file that is missing, torn or another program's."""
_ROUNDING = 1e-6
_SETTINGS = ("eval.temperature", "eval.top_p", "eval.samples_per_prompt", "eval.function")
"""Recipe keys that change how the same prompts are answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownEvaluation:
    """Holds one of the run's own evaluations, with its interval."""

    step: int
    accuracy: float
    interval: Estimate | None
    """None if its samples are gone: `miles eval` with other settings has overwritten them."""
    num_prompts: int
    seconds: float
    truncated_fraction: float | None
    response_tokens_mean: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSet:
    """Holds one result of `miles eval`."""

    set: str
    step: int
    accuracy: float
    num_prompts: int
    estimates: Mapping[str, Estimate]
    """avg@n, pass@k, maj@k"""


def evaluations_of(run: RunDir, history: History) -> list[ShownEvaluation]:
    """Return the run's own evaluations by step, at most MAX_SHOWN of them."""
    done = sorted(history.evaluations, key=lambda one: one.step)
    if len(done) > MAX_SHOWN:
        places = {round(n * (len(done) - 1) / (MAX_SHOWN - 1)) for n in range(MAX_SHOWN)}
        done = [done[place] for place in sorted(places)]
    shown = []
    for one in done:
        shown.append(
            ShownEvaluation(
                step=one.step,
                accuracy=one.accuracy,
                interval=interval_of(run, one),
                num_prompts=one.num_prompts,
                seconds=one.seconds,
                truncated_fraction=one.figures.get("truncated_fraction"),
                response_tokens_mean=one.figures.get("response_tokens_mean"),
            )
        )
    return shown


def interval_of(run: RunDir, evaluation: Evaluation) -> Estimate | None:
    """Return the interval of an evaluation's accuracy; None if the rewards in its file are not
    those of the samples whose accuracy the event has."""
    rewards = _rewards(run.path / evaluation.path) if evaluation.path else {}
    means = [fmean(values) for values in rewards.values()]
    if len(means) < 2 or abs(fmean(means) - evaluation.accuracy) >= _ROUNDING:
        return None
    return estimate_mean(means, samples_per_prompt=min(map(len, rewards.values())))


def settings_of_evaluation(file: Path, recipe: Mapping[str, Any]) -> dict[str, object]:
    """Return the settings that an evaluation's results depend on: those that `miles eval` wrote
    next to the samples, else those of the run's recipe."""
    try:
        settings = read_json(file.with_suffix(".json"))["settings"]
        return {key: settings.get(key) for key in _SETTINGS}
    except _UNUSABLE:
        return {key: recipe.get(key) for key in _SETTINGS}


def rewards_by_prompt(file: Path) -> dict[str, float]:
    """Return digest of a prompt and its label -> mean reward of its samples, in the order of
    the file. Empty if there is no file, or it has none; a repeated prompt has an entry for each
    time."""
    return {key: fmean(values) for key, values in _rewards(file).items()}


def _rewards(file: Path) -> dict[str, list[float]]:
    """Return the rewards of each sample, by key as in `rewards_by_prompt`."""
    try:
        lines = read_lines(file)
    except OSError:
        return {}
    rewards, places = dict[str, list[float]](), dict[str, dict[str, int]]()
    for line in lines:
        row = _row(line)
        if row is None:
            continue
        prompt = json.dumps([row["prompt"], row.get("label"), *row.get("images", ())]).encode()
        digest = hashlib.blake2b(prompt, digest_size=16).hexdigest()
        by_prompt = places.setdefault(digest, {})
        key = f"{digest}-{by_prompt.setdefault(str(row.get('index')), len(by_prompt))}"
        rewards.setdefault(key, []).append(float(row["reward"] or 0.0))
    return rewards


def evaluation_files(run: RunDir) -> dict[str, dict[int, Path]]:
    """Return the files of samples: set -> step -> file. The set of the run's own held-out prompts
    has an empty name."""
    files = dict[str, dict[int, Path]]()
    for file in sorted(run.eval_dir.glob("**/step_*.jsonl")):
        number = file.stem.removeprefix("step_")
        if number.isdigit():
            name = str(file.parent.relative_to(run.eval_dir))
            files.setdefault("" if name == "." else name, {})[int(number)] = file
    return files


def read_sets(run: RunDir) -> list[ShownSet]:
    """Read the results of `miles eval`, by set and step. Unreadable files are left out."""
    found = (_set(file) for file in sorted(run.eval_dir.glob("**/step_*.json")))
    sets = [one for one in found if one is not None]
    return sorted(sets, key=lambda one: (one.set, one.step))


def _set(file: Path) -> ShownSet | None:
    try:
        result: dict[str, Any] = read_json(file)
        return ShownSet(
            set=str(result["set"]),
            step=int(result["step"]),
            accuracy=float(result["accuracy"]),
            num_prompts=int(result["num_prompts"]),
            estimates={
                name: Estimate(**{key: float(value) for key, value in one.items()})
                for name, one in result["estimates"].items()
            },
        )
    except _UNUSABLE:
        return None


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    is_scored = isinstance(row, dict) and isinstance(row.get("reward", ""), float | int | None)
    return row if is_scored and "prompt" in row else None
