"""What would make a recipe fit that does not: options that can be added to the user's command, each
planned with before it is proposed. Pure; called by `make` when it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import yaml

from milescli.core.errors import FitError, RecipeError
from milescli.plan.reasons import summary
from milescli.plan.types import Plan
from milescli.platform.machine import Machine
from milescli.recipe.schema import Parallel, Recipe

_MOST_NODES = 64
"""Nodes up to which a refusal looks for what would fit."""
_MOST_FIXES = 3
"""More than that nobody reads below an error."""
_LEAST_TOKENS = 256
"""Of a response: shorter limits are not proposed."""
_OPTION = re.compile(
    r"--(?:set (?P<key>[a-z_.]+)=(?P<value>\S+)|(?P<flag>gpus|nodes) (?P<number>\d+))"
)
_FREE = {"train.recompute": "auto", "engines.placement": "auto"}
"""What leaves a key to the planner, where it is not null."""
_PINS = (
    *(f"parallel.{key}" for key in Parallel.model_fields),
    "engines.tp",
    "engines.ep",
    "engines.attention_dp",
    "engines.num",
    "engines.memory_fraction",
    "engines.max_running_requests",
    "engines.max_total_tokens",
    "engines.placement",
    "train.max_tokens_per_microbatch",
    "train.recompute",
    "train.optimizer.offload",
)
"""Keys that pin what the planner would choose."""

_Planner = Callable[[Recipe], Plan]
"""Raises FitError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """Changes of a recipe, and the options that stand for them."""

    kind: str
    """Of trials of a kind, the first that fits is proposed."""
    options: str
    changes: dict[str, object]


def with_remedies(error: FitError, recipe: Recipe, machine: Machine, plans: _Planner) -> FitError:
    """The same refusal, with fixes that were tried: the one that the refusal proposes itself, pins
    to let go, fewer tokens, more devices, an adapter. What it proposes in words is kept."""
    fixes: dict[str, str] = {}
    for trial in _trials(error, recipe, machine):
        if trial.kind in fixes or len(fixes) == _MOST_FIXES:
            continue
        try:
            plan = plans(_changed(recipe, trial.changes))
        except (FitError, RecipeError, ValueError):  # or the recipe cannot be changed so
            continue
        then = f"   # then {summary(plan.trainer)} fits" if "pin" in trial.kind else ""
        then = "   # train an adapter instead of all weights" if trial.kind == "adapter" else then
        fixes[trial.kind] = trial.options + then
    words = [fix for fix in error.fixes if not _parsed(fix)]
    return FitError(
        error.what,
        why=error.why,
        fix=[*dict.fromkeys(fixes.values()), *words] or _last_resorts(machine),
    )


def _trials(error: FitError, recipe: Recipe, machine: Machine) -> Iterator[_Trial]:
    """Lazily, the least change first."""
    for fix in error.fixes:
        if changes := _parsed(fix):
            yield _Trial(kind="proposed", options=fix.partition("#")[0].strip(), changes=changes)
    pinned = [key for key in _PINS if _value(recipe, key) != _FREE.get(key)]
    rooms = [[key for key in pinned if key.startswith(room)] for room in ("parallel.", "engines.")]
    for kind, keys in (
        *(("a pin", [key]) for key in pinned),
        *(("pins", some) for some in (*rooms, pinned) if len(some) > 1),
    ):
        changes = {key: _FREE.get(key) for key in keys}
        options = " ".join(f"--set {key}={changes[key] or 'null'}" for key in keys)
        yield _Trial(kind=kind, options=options, changes=changes)
    visible = min((len(node.devices) for node in machine.nodes), default=0)
    if recipe.machine.gpus and recipe.machine.gpus < visible:
        yield _Trial(kind="gpus", options=f"--gpus {visible}", changes={"machine.gpus": visible})
    if visible and recipe.machine.gpus != 0:
        for nodes in (recipe.machine.nodes * factor for factor in (2, 4, 8, 16, 32, 64)):
            if nodes <= _MOST_NODES:
                yield _Trial(
                    kind="nodes", options=f"--nodes {nodes}", changes={"machine.nodes": nodes}
                )
    prompts = recipe.rollout.prompts_per_step
    for more in (2 * prompts, 8 * prompts):
        yield _Trial(
            kind="prompts",
            options=f"--set rollout.prompts_per_step={more}",
            changes={"rollout.prompts_per_step": more},
        )
    for tokens in (recipe.rollout.max_response_tokens // part for part in (2, 4, 8)):
        if tokens >= _LEAST_TOKENS:
            key = "rollout.max_response_tokens"
            yield _Trial(kind="tokens", options=f"--set {key}={tokens}", changes={key: tokens})
    if not recipe.train.lora.is_on:
        yield _Trial(kind="adapter", options="--lora 16", changes={"train.lora.rank": 16})


def _parsed(fix: str) -> dict[str, object]:
    """What its options change; empty where it is no list of options."""
    text = fix.partition("#")[0].strip()
    options = list(_OPTION.finditer(text))
    if " ".join(option[0] for option in options) != text:
        return {}
    return {
        option["key"] or f"machine.{option['flag']}": yaml.safe_load(option["value"])
        if option["key"]
        else int(option["number"])
        for option in options
    }


def _value(recipe: Recipe, key: str) -> object:
    value: object = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _changed(recipe: Recipe, changes: dict[str, object]) -> Recipe:
    raw = recipe.model_dump()
    for key, value in changes.items():
        *sections, last = key.split(".")
        place = raw
        for name in sections:
            place = place[name]
        place[last] = value
    return Recipe.model_validate(raw)


def _last_resorts(machine: Machine) -> list[str]:
    larger = "--dry-run --on 8xMI355X" if machine.kind == "rocm" else "--dry-run --on 8xB300"
    return [
        f"{larger}   # a machine with more memory, or more nodes of it",
        "--set model.path=FOLDER   # a smaller model",
    ]
