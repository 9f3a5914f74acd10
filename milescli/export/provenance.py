"""Collects what a model card says about a run, as plain data from the run's own files. Contains no
paths of the machine and no secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from milescli.checkpoint.run_dir import read_jsonl
from milescli.core.files import read_json
from milescli.recipe.data import Data
from milescli.recipe.data_files import FIELDS, files_of
from milescli.recipe.model import Model
from milescli.recipe.schema import Recipe

HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
"""ORG/NAME; a folder's path may have the same form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Describes one evaluation on held-out prompts."""

    step: int
    accuracy: float
    num_prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Describes how the weights were made."""

    base_model: str | None
    """Name on the hub; None: made here from a seed, or a folder without a public name."""
    step: int
    """Number of completed RL steps."""
    recipe: Recipe
    seed: int
    rewards: tuple[tuple[int, float], ...] = ()
    """(step, mean reward), up to `step`"""
    evals: tuple[Evaluated, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    """prompts, eval, demonstrations -> name, rows and checksum"""


def read_provenance(*, recipe: Recipe, step: int, manifest: Path, events: Path) -> Provenance:
    """Read how the weights were made, from a run's recipe, manifest.json and events.jsonl; the last
    may be missing or end in half a line."""
    recorded = _json(manifest)
    packages = recorded.get("packages")
    versions = {
        "miles": str(recorded.get("miles", "")),
        **(packages if isinstance(packages, dict) else {}),
    }
    rewards, evals = _read_events(events, upto=step)
    return Provenance(
        base_model=hub_name(recipe.model),
        step=step,
        recipe=recipe,
        seed=recipe.run.seed,
        rewards=tuple(sorted(rewards.items())),
        evals=tuple(evals[at] for at in sorted(evals)),
        versions={name: version for name, version in versions.items() if version},
        data=_data(recipe.data, recorded.get("data")),
    )


def hub_name(model: Model) -> str | None:
    """Return ORG/NAME if the recipe's model is on the hub."""
    path = model.path or ""
    return path if HUB_NAME.match(path) and not Path(path).expanduser().is_dir() else None


def _data(data: Data, recorded: object) -> dict[str, str]:
    described = {}
    for name in FIELDS:
        files = files_of(data, name)
        if not files:
            continue
        # a file is named, its place on the machine is nobody's business
        words = [
            f"`{file.spelled()}`"
            if file.name.startswith("task:")
            else f"`{Path(file.name).name}{file.rows}`"
            for file in files
        ]
        report = recorded.get(name) if isinstance(recorded, dict) else None
        if isinstance(report, dict):
            words += (
                [f"{report.get('num_rows'):,} rows"]
                if isinstance(report.get("num_rows"), int)
                else []
            )
            words += [f"sha256 `{str(report['sha256'])[:16]}…`"] if report.get("sha256") else []
        described[name] = ", ".join(words)
    return described


def _read_events(file: Path, *, upto: int) -> tuple[dict[int, float], dict[int, Evaluated]]:
    """Return the events by step; for a step that was repeated after a resume, the last ones."""
    rewards: dict[int, float] = {}
    evals: dict[int, Evaluated] = {}
    for event in cast("Iterator[dict[str, Any]]", read_jsonl(file)):
        try:
            if event["event"] == "StepDone" and event["step"] <= upto:
                rewards[event["step"]] = float(event["rollout"]["reward_mean"])
            elif event["event"] == "EvalDone" and event["step"] <= upto:
                evals[event["step"]] = Evaluated(
                    step=event["step"],
                    accuracy=float(event["accuracy"]),
                    num_prompts=int(event["num_prompts"]),
                )
        except (ValueError, KeyError, TypeError, OverflowError):
            continue  # a field is damaged, or of another version
    return rewards, evals


def _json(file: Path) -> dict[str, object]:
    try:
        value = read_json(file)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
