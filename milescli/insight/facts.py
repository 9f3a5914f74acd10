"""Reads facts about a run besides its events: its recipe and its plan, as far as they can be read.
A run of another version of miles is read as far as possible; a plan with a damaged part counts as
missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml
from annotated_types import Ge, Lt

from milescli.checkpoint.run_dir import FORKED_FROM, RunDir
from milescli.core.files import parse_json, parse_yaml, read_regular_bytes, read_regular_text
from milescli.recipe.section import of_type

_MOST = 2**53
Count = Annotated[int, Ge(0), Lt(_MOST)]


@dataclass(frozen=True, slots=True)
class _Batch:
    updates_per_step: Count = 1
    samples_per_prompt: Count = 1


@dataclass(frozen=True, slots=True)
class _Layout:
    num: Count = 0
    tp: Count = 1
    pp: Count = 1
    cp: Count = 1
    dp: Count = 1


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    size_bytes: Count


@dataclass(frozen=True, slots=True)
class _Forecast:
    device: str = ""
    memory_bytes: Count = 0
    training: Sequence[_Part] = ()
    rollout: Sequence[_Part] = ()


@dataclass(frozen=True, slots=True)
class _Process:
    name: str
    node: Count
    phases: Mapping[str, Count]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Defines the part of plan.json that is read; see `plan.types.Plan`."""

    batch: _Batch = _Batch()
    engines: _Layout = _Layout()
    engines_apart: Count = 0
    forecast: _Forecast | None = None
    max_staleness: Count = 0
    processes: Sequence[_Process] = ()
    steps: Count = 0
    trainer: _Layout = _Layout()


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Holds the recipe, plan and manifest of one run."""

    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Every key by its dotted name."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """plan.json"""
    manifest: Mapping[str, Any] = field(default_factory=dict)
    """manifest.json"""

    def key(self, name: str, default: Any = None) -> Any:
        """Return a value of the recipe; the default if it has none or cannot be read."""
        value = self.recipe.get(name)
        return default if value is None else value

    def count(self, name: str) -> int:
        """Return a value of the recipe that is a count; 0 if it is no count."""
        value = self.recipe.get(name)
        return value if isinstance(value, int) and 0 < value < _MOST else 0

    @property
    def forked_from(self) -> str:
        """Return `RUN @ step N`: the run and step at which a fork began; empty for other runs."""
        trunk = self.manifest.get(FORKED_FROM)
        if not isinstance(trunk, dict):
            return ""
        return f"{trunk.get('run')} @ step {trunk.get('step')}"

    @property
    def updates_per_step(self) -> int:
        """Return the number of optimizer updates per step."""
        return int(self.plan.get("batch", {}).get("updates_per_step", 1))

    @property
    def max_staleness(self) -> int:
        """Return the largest allowed age of samples, in steps."""
        return int(self.plan.get("max_staleness", 0))

    @property
    def old_logprobs(self) -> str:
        """Return whose log-probs the policy ratio is to, as `Recipe.old_logprobs` does: trainer or
        engine."""
        named = self.key("train.old_logprobs", "auto")
        if named != "auto":
            return str(named)
        return "engine" if self.max_staleness else "trainer"

    @property
    def precision(self) -> str:
        """Return bf16 or fp32."""
        return str(self.plan.get("precision", "bf16"))

    @property
    def is_colocated(self) -> bool:
        """Return True if engines and trainer take turns on the same devices, or share one CPU."""
        return bool(self.plan.get("colocated", True)) or self.plan.get("device_kind") == "cpu"

    @property
    def num_engine_devices(self) -> int:
        """Return the number of devices of all engines that sample."""
        engines = self.plan.get("engines", {})
        count = int(engines.get("num", 0)) - int(self.plan.get("engines_apart", 0))
        return max(0, count) * int(engines.get("tp", 1))

    @property
    def num_trainer_devices(self) -> int:
        """Return the number of trainer ranks."""
        trainer = self.plan.get("trainer", {})
        size = 1
        for axis in ("tp", "pp", "cp", "dp"):
            size *= int(trainer.get(axis, 1))
        return size


def read_facts(run: RunDir) -> RunFacts:
    """Read the facts that can be read; the rest is empty. Raises nothing."""
    manifest = _json(run.manifest_file)
    recipe = manifest.get("recipe")
    if not isinstance(recipe, dict):
        recipe = _flat_recipe(run)
    plan = _json(run.plan_file)
    try:
        of_type(_Plan, plan)
    except ValueError:
        plan = {}
    return RunFacts(recipe=recipe, plan=plan, manifest=manifest)


def _json(file: Path) -> dict[str, Any]:
    try:
        value = parse_json(read_regular_bytes(file))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _flat_recipe(run: RunDir) -> dict[str, Any]:
    try:
        value = parse_yaml(read_regular_text(run.recipe_file))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return dict(_flat(value)) if isinstance(value, dict) else {}


def _flat(section: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    flat = list[tuple[str, Any]]()
    for name, value in section.items():
        if isinstance(value, dict):
            flat += _flat(value, f"{above}{name}.")
        else:
            flat.append((f"{above}{name}", value))
    return flat
