"""Reads everything that a report needs of one run from its directory. Nothing is locked or written,
so that somebody else's run and one that is running can be read, too."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from milescli.autopsy.why import Memory, read_memory
from milescli.checkpoint.run_dir import RunDir
from milescli.core.files import parse_yaml, read_regular_text
from milescli.core.history import History
from milescli.core.private import without_paths, without_secrets_in
from milescli.insight.case import LOSS, REWARD, Verdict
from milescli.insight.facts import RunFacts, read_facts
from milescli.insight.reader import read_history
from milescli.insight.summary import Summary, summarize
from milescli.report.chosen_samples import ShownStep, choose_steps
from milescli.report.evaluations import ShownEvaluation, ShownSet, evaluations_of, read_sets
from milescli.report.formats import steps

_DEFAULT = "default"
_CHECKSUM_LETTERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownKey:
    """Holds one key of a recipe, as a report shows it."""

    name: str
    """Dotted: train.optimizer.lr"""
    value: str
    """Value without secrets and paths of the machine."""
    origin: str
    """default, recipe quickstart.yaml:6, --set, ..."""

    @property
    def is_set(self) -> bool:
        """Return True if somebody set the key."""
        return self.origin != _DEFAULT


def read_keys(file: Path) -> list[ShownKey]:
    """Read the keys of a resolved recipe in the order of the file; none if it cannot be read."""
    try:
        lines = read_regular_text(file, errors="replace").splitlines()
    except OSError:
        return []
    keys, above = list[ShownKey](), list[str]()
    for line in lines:
        body, _, comment = line.rpartition("  # ")
        body = body or line
        name, colon, text = body.strip().partition(":")
        if not colon or name.startswith("#"):
            continue
        del above[(len(body) - len(body.lstrip())) // 2 :]
        if not text.strip():
            above.append(name)
            continue
        full = ".".join([*above, name])
        keys.append(
            ShownKey(name=full, value=_shown(full, text.strip()), origin=_origin(comment.strip()))
        )
    return keys


def _shown(name: str, text: str) -> str:
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        value = text
    value = without_secrets_in(value, name=name)
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _origin(comment: str) -> str:
    """Return where a key was set. The text after `--set KEY=` is the value, which may be a
    secret."""
    return "--set" if comment.startswith("--set ") else without_paths(comment) or _DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Holds the content of a report on one run, or on one of its adapters."""

    run: RunDir
    history: History
    facts: RunFacts
    summary: Summary
    """Summary of the run; for an adapter, with the state of the whole run."""
    keys: Sequence[ShownKey]
    samples: Sequence[ShownStep]
    """Samples of the first, a middle and the last step."""
    evaluations: Sequence[ShownEvaluation]
    """Evaluations on the run's own held-out prompts, by step."""
    sets: Sequence[ShownSet]
    """Results of `miles eval`."""
    memory: Memory | None
    adapters: Sequence[Subject] = ()
    made_s: float = math.nan
    """When it was read, seconds since 1970."""

    @property
    def name(self) -> str:
        """Return the name of the run."""
        return self.run.full_name

    @property
    def verdict(self) -> Verdict:
        """Return the verdict: whether the run is learning, and what is wrong."""
        return self.summary.verdict

    @property
    def progress(self) -> str:
        """Return the progress of the run: done, step 12 of 30"""
        return f"{self.summary.state}, step {steps(self.summary)}"

    @property
    def curve(self) -> str:
        """Return the name in metrics.jsonl of the metric that should improve."""
        return LOSS if self.learns_from_rows else REWARD

    @property
    def learns_from_rows(self) -> bool:
        """Return True for SFT, DPO and other runs without rollout."""
        return self.history.learns_from_rows

    def versions(self) -> dict[str, str]:
        """Return the versions of miles, its commit and its packages, by name."""
        manifest = self.facts.manifest
        packages = manifest.get("packages")
        versions = {
            "miles": manifest.get("miles"),
            "commit": manifest.get("commit"),
            "python": manifest.get("python"),
            **(packages if isinstance(packages, dict) else {}),
        }
        return {name: str(version) for name, version in versions.items() if version}

    @property
    def machine(self) -> str:
        """Return the machine of the run; empty if unknown."""
        return without_paths(str(self.facts.manifest.get("machine", "")))

    def decisions(self) -> list[dict[str, str]]:
        """Return the plan's decisions, each with key, value and reason."""
        decisions = self.facts.plan.get("decisions")
        return [
            {name: without_paths(str(one.get(name, ""))) for name in ("key", "value", "reason")}
            for one in (decisions if isinstance(decisions, list) else [])
            if isinstance(one, dict)
        ]

    def data(self) -> dict[str, dict[str, Any]]:
        """Return the manifest's description of each data file, by prompts, eval, ..."""
        data = self.facts.manifest.get("data")
        return (
            {name: one for name, one in data.items() if isinstance(one, dict)}
            if isinstance(data, dict)
            else {}
        )

    def data_words(self) -> dict[str, str]:
        """Describe each data file: prompts -> sums.jsonl, 8,192 rows, sha256 b376645265a214f1"""
        described = {}
        for name, one in self.data().items():
            words = [str(one.get("path", "")).rpartition("/")[2]]
            if isinstance(one.get("num_rows"), int):
                words.append(f"{one['num_rows']:,} rows")
            if one.get("sha256"):
                words.append(f"sha256 {str(one['sha256'])[:_CHECKSUM_LETTERS]}")
            described[name] = ", ".join(word for word in words if word)
        return described

    def points(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of a metric, for each step with a finite one."""
        return self.history.columns.points(name)


def read_subject(run: RunDir) -> Subject:
    """Read all of a run; one that trains several adapters has a subject for each."""
    history = read_history(run)
    whole = _subject(run, history)
    adapters = [
        _subject(RunDir(run.adapters_dir / name), own) for name, own in history.adapters.items()
    ]
    return replace(whole, adapters=adapters)


def _subject(run: RunDir, history: History) -> Subject:
    facts = read_facts(run)
    attempts = run.attempts()
    return Subject(
        run=run,
        history=history,
        facts=facts,
        summary=summarize(run, history, facts),
        keys=read_keys(run.recipe_file),
        samples=choose_steps(run),
        evaluations=evaluations_of(run, history),
        sets=read_sets(run),
        memory=read_memory(attempts[-1]) if attempts else None,
        made_s=time.time(),
    )
