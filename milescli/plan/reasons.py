"""Explains why a layout was chosen, axis by axis, and what prevents a plan if none fits. Pure; text
for people, with the numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import yaml

from milescli.core.errors import FitError, RecipeError
from milescli.core.units import GIB, format_bytes, format_duration
from milescli.plan.memory import FRAGMENTED_SHARE
from milescli.plan.placement import separate_engines_purpose
from milescli.plan.search import (
    EngineChoice,
    TrainerChoice,
    TrainerSearch,
    nearest_engines,
    similar_s,
)
from milescli.plan.search_space import SearchSpace
from milescli.plan.types import Alternative, Log, Plan, TrainerLayout
from milescli.platform.machine import Machine
from milescli.recipe.check import rules
from milescli.recipe.schema import Parallel, Recipe
from milescli.recipe.section import refuse

_AXES = ("tp", "pp", "cp", "ep", "etp")


def summary(layout: TrainerLayout) -> str:
    """Format a layout: `tp 2 x pp 4 x cp 1 x dp 8, ep 16`."""
    text = f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x dp {layout.dp}"
    if layout.ep > 1 or layout.etp != layout.tp:
        text += f", ep {layout.ep}" + (f" x etp {layout.etp}" if layout.etp > 1 else "")
    if layout.first_stage_layers or layout.last_stage_layers:
        ends = [("first", layout.first_stage_layers), ("last", layout.last_stage_layers)]
        text += "".join(f", {name} stage {layers} layers" for name, layers in ends if layers)
    if layout.recompute == "full":
        text += ", recompute"
    return text + (", optimizer on the host" if layout.offload_optimizer else "")


def explain(
    space: SearchSpace,
    chosen: TrainerChoice,
    searched: TrainerSearch,
    *,
    rest_s: float,
    recipe: Recipe,
    log: Log,
) -> None:
    """Log one decision per axis of the trainer. `rest_s` is the seconds of a step outside the
    trainer."""
    layout, pins = chosen.layout, recipe.parallel
    for axis in _AXES:
        if axis in ("ep", "etp") and not space.facts.num_experts:
            continue
        pinned = getattr(pins, axis) is not None
        reason = (
            f"pinned by `parallel.{axis}`"
            if pinned
            else _compare_with_next(axis, chosen, searched, rest_s=rest_s)
        )
        log.note(f"trainer.{axis}", getattr(layout, axis), reason)
    parts = layout.tp * layout.pp * layout.cp
    log.note(
        "trainer.dp",
        layout.dp,
        f"{layout.world_size} ranks / (tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = {parts})",
    )
    for name in ("first_stage_layers", "last_stage_layers"):
        if getattr(layout, name):
            pinned = getattr(pins, name) is not None
            why = (
                f"pinned by `parallel.{name}`"
                if pinned
                else "the output layer's work evens out with fewer layers there"
            )
            log.note(f"trainer.{name}", getattr(layout, name), why)
    if layout.sequence_parallel:
        why = "tp > 1: norms and residuals are split along the sequence, which saves memory"
        log.note("trainer.sequence_parallel", True, why)
    _explain_memory(space, chosen, recipe, log)


def _compare_with_next(
    axis: str, chosen: TrainerChoice, searched: TrainerSearch, *, rest_s: float
) -> str:
    """Describe the best layout with another value of the axis, and how much longer it takes."""
    own = getattr(chosen.layout, axis)
    others: dict[int, TrainerChoice] = {}
    for choice in searched.fitting:
        others.setdefault(getattr(choice.layout, axis), choice)
    others.pop(own, None)
    if not others:
        num = searched.num_evaluated
        return f"no other value is legal and fits, of {num} layouts that were weighed"
    best = min(others.values(), key=lambda choice: choice.rank)
    value, seconds, mine = getattr(best.layout, axis), best.seconds.total, chosen.seconds.total
    if mine > similar_s(seconds, rest_s=rest_s):
        return (
            f"{axis} {value} would train in {_seconds(seconds)} instead of {_seconds(mine)}, and "
            "not fit beside the engines"
        )
    comparison = (
        f"trains in {_seconds(mine)}; the best layout with {axis} {value} takes {_seconds(seconds)}"
    )
    if seconds > similar_s(mine, rest_s=rest_s) or chosen.division_key > best.division_key:
        return comparison
    return (
        f"{comparison}: too close to tell in a step of {_seconds(mine + rest_s)}, and this layout "
        "is the simpler one"
    )


def _explain_memory(space: SearchSpace, chosen: TrainerChoice, recipe: Recipe, log: Log) -> None:
    layout, train = chosen.layout, recipe.train
    if train.recompute != "auto":
        why = "pinned by `train.recompute`"
    elif layout.recompute == "full":
        why = "activations would not fit: the backward pass computes each layer once more"
    else:
        why = f"activations of {format_bytes(chosen.needs.activations)} fit"
    log.note("trainer.recompute", layout.recompute, why)
    if train.optimizer.offload is not None:
        why = "pinned by `train.optimizer.offload`"
    else:
        why = (
            "weights, gradients and moments fit"
            if not layout.offload_optimizer
            else "nothing else fits"
        )
    log.note("trainer.offload_optimizer", layout.offload_optimizer, why)
    pinned = train.max_tokens_per_microbatch is not None
    count = space.time.num_microbatches(layout, space.work, chosen.cap)
    why = (
        "pinned by `train.max_tokens_per_microbatch`"
        if pinned
        else f"about {count} microbatches a rank and update"
    )
    log.note("trainer.max_tokens_per_microbatch", chosen.cap, why)


def explain_engines(
    space: SearchSpace,
    chosen: EngineChoice,
    fleets: list[EngineChoice],
    *,
    recipe: Recipe,
    log: Log,
) -> None:
    """Log one decision per axis of the engines."""
    layout, pins = chosen.layout, recipe.engines

    def note(axis: str, reason: str) -> None:
        pinned = getattr(pins, axis) is not None
        why = f"pinned by `engines.{axis}`" if pinned else reason
        log.note(f"engines.{axis}", getattr(layout, axis), why)

    note("tp", _why_engine_size(chosen, fleets))
    if layout.ep > 1 or pins.ep:
        note("ep", "whole experts, shared out over the engine")
    if layout.attention_dp > 1 or pins.attention_dp:
        note("attention_dp", "each cache is held once, not by every device")
    note("num", f"{layout.num * layout.tp} devices / tp {layout.tp}")
    note("max_running_requests", _why_so_many_requests(space, chosen))
    note(
        "memory_fraction",
        f"graphs, a prefill and both processes keep the rest; {chosen.cache_tokens:,} tokens of "
        "cache an engine",
    )


def _why_engine_size(chosen: EngineChoice, fleets: list[EngineChoice]) -> str:
    other = next((fleet for fleet in fleets if fleet.layout.tp != chosen.layout.tp), None)
    if other is None:
        return "no other size holds the model"
    why = (
        f"generates in {_seconds(chosen.seconds.total)}; engines of tp {other.layout.tp} take "
        f"{_seconds(other.seconds.total)}"
    )
    if other.seconds.total >= chosen.seconds.total:
        return why
    if other.division_key <= chosen.division_key:
        return f"{why}, and do not fit beside the trainer"
    waits = other.crowded > chosen.crowded
    drawback = "of which some would wait for cache" if waits else "which are cut more"
    return f"{why}: too close to tell, {drawback}"


def _why_so_many_requests(space: SearchSpace, chosen: EngineChoice) -> str:
    num, groups = chosen.layout.num, chosen.layout.attention_dp
    why = f"{space.work.num_samples} samples a step over {num} engine{'s'[: num > 1]}"
    if groups > 1:
        why += f", {chosen.layout.max_running_requests // groups} for each of {groups} groups"
    return why


def alternatives(
    space: SearchSpace, chosen: TrainerChoice, searched: TrainerSearch, *, step_s: float
) -> list[Alternative]:
    """Return the next best layouts with other meshes, at most three."""
    meshes = {_mesh(chosen.layout)}
    others = []
    for choice in searched.fitting:
        if _mesh(choice.layout) in meshes or len(others) == 3:
            continue
        meshes.add(_mesh(choice.layout))
        others.append(
            Alternative(
                layout=summary(choice.layout),
                step_s=round(step_s - chosen.seconds.total + choice.seconds.total, 3),
                train_s=round(choice.seconds.total, 3),
                train_bytes=choice.needs.total,
            )
        )
    return others


def _mesh(layout: TrainerLayout) -> tuple[int, ...]:
    return (layout.tp, layout.pp, layout.cp, layout.ep, layout.etp)


def refusal(
    space: SearchSpace,
    recipe: Recipe,
    machine: Machine,
    searched: TrainerSearch,
    fleets: list[EngineChoice],
    *,
    num_ranks: int,
) -> FitError:
    """Return the error that explains why nothing fits, with the equation of the closest layout;
    `with_remedies` adds fixes that work."""
    where = f"{num_ranks} x {machine.nodes[0].devices[0].name}"
    work = space.work
    if not searched.num_evaluated:
        why = (
            f"no layout is legal: tp x pp x cp x dp must be {num_ranks}, and dp x updates_per_step "
            f"at most {work.num_samples} samples "
            f"(now {_pins(space.pins) or 'nothing is pinned'})"
        )
        return FitError(f"recipe `{recipe.name}` has no layout on {where}", why=why, fix=[])
    if not searched.fitting:
        assert searched.nearest is not None
        why = (
            f"the trainer at {summary(searched.nearest.layout)}: "
            f"{equation(space, searched.nearest)}"
        )
        return FitError(f"recipe `{recipe.name}` does not fit on {where}", why=why, fix=[])
    if not fleets:
        num_devices = space.devices_per_node * recipe.machine.nodes
        num_devices = num_ranks if space.colocated else num_devices - num_ranks
        where = f"{num_devices} x {machine.nodes[0].devices[0].name}"
        why = why_no_engine(space, num_devices)
        if space.work.engines_apart:
            apart = space.work.engines_apart
            purpose = separate_engines_purpose(recipe)
            why += f"; and {1 + apart} are needed, of which {apart} for {purpose}"
        what = f"the engines of recipe `{recipe.name}` do not fit on {where}"
        return FitError(what, why=why, fix=[])
    host = searched.fitting[0].needs.host * min(space.devices_per_node, num_ranks)
    why = (
        f"{equation(space, searched.fitting[0])}; while weights are passed, an engine's "
        f"{format_bytes(fleets[0].needs.weights)} are in memory next to the trainer's "
        f"{format_bytes(searched.fitting[0].needs.weights)}; when inactive, the trainer keeps "
        f"{format_bytes(host)} of a node's {format_bytes(machine.nodes[0].memory_bytes)} main "
        "memory"
    )
    keys = {"fault.copy_every=0": "copies", "checkpoint.async_save=false": "saved"}
    extras = {key: getattr(searched.fitting[0].needs, part) for key, part in keys.items()}
    for key, size in extras.items():
        if size:
            size *= min(space.devices_per_node, num_ranks)
            why += f", {format_bytes(size)} of it for `{key.partition('=')[0]}`"
    return FitError(
        f"trainer and engines of recipe `{recipe.name}` do not fit together on {where}",
        why=why,
        fix=[f"--set {key}" for key, size in extras.items() if size],
    )


def why_no_engine(space: SearchSpace, num_devices: int) -> str:
    """Return why no fleet fits on the devices: their number, or the memory of the largest
    engines."""
    pins = space.engine_pins
    least = max(pins.num or 1, 1 + space.work.engines_apart)
    if (nearest := nearest_engines(space, num_devices)) is None:
        tp = f" x tp {pins.tp}" if pins.tp else ""
        return (
            f"{least} engine{'s'[: least > 1]}{tp} need at least {least * (pins.tp or 1)} devices, "
            f"and {num_devices} are for engines"
        )
    layout, needs = nearest
    parts = {
        "weights": needs.weights,
        "cache": needs.cache,
        "graphs": needs.graphs,
        "workspace": needs.workspace,
        "the trainer's process": space.efficiency.trainer_context * space.colocated,
    }
    device = f"an engine of tp {layout.tp}"
    if pins.memory_fraction is not None:
        device += f" with `engines.memory_fraction` {pins.memory_fraction:g}"
    if (total := sum(parts.values())) > space.memory_bytes:
        listed = " + ".join(f"{name} {part / GIB:.1f}" for name, part in parts.items() if part)
        return (
            f"{device} needs {listed} = {total / GIB:.1f} GiB on each device > "
            f"{space.memory_bytes / GIB:.1f}"
        )
    longest = space.longest_served
    if (pinned := pins.max_total_tokens) is not None and pinned < longest:
        return (
            f"`engines.max_total_tokens` {pinned:,} is less than one sequence of {longest:,} tokens"
        )
    return (
        f"{device} has weights of {format_bytes(needs.weights)} on each of its devices, which "
        f"leave {format_bytes(needs.cache)} for the cache: less than one sequence of {longest:,} "
        "tokens needs"
    )


def equation(space: SearchSpace, choice: TrainerChoice) -> str:
    """Format the memory equation in GiB: weights + gradients + ... = total > budget."""
    needs = choice.needs
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")
    parts_sum = " + ".join(f"{name} {getattr(needs, name) / GIB:.1f}" for name in parts)
    sign = ">" if needs.total > space.trainer_budget else "<="
    less = f"less {FRAGMENTED_SHARE:.0%} margin"
    if space.colocated:
        less += f" and {space.efficiency.asleep / GIB:.1f} of the sleeping engine"
    budget = (
        f"{space.trainer_budget / GIB:.1f} ({space.memory_bytes / GIB:.0f} GiB a device {less})"
    )
    return f"{parts_sum} = {needs.total / GIB:.1f} GiB {sign} {budget}"


def _pins(pins: Parallel) -> str:
    return ", ".join(
        f"parallel.{name}={value}" for name, value in pins.model_dump().items() if value is not None
    )


def _seconds(seconds: float) -> str:
    return format_duration(seconds)


_MAX_NODES = 64
"""Most nodes for which a refusal searches a machine that would fit."""
_MAX_FIXES = 3
"""Most fixes of an error: nobody reads more."""
_MIN_TOKENS = 256
"""Shortest response limit that is proposed."""
_OPTION = re.compile(
    r"--(?:set (?P<key>[a-z_.]+)=(?P<value>\S+)|(?P<flag>gpus|nodes) (?P<number>\d+))"
)
_FREE = {"train.recompute": "auto", "engines.placement": "auto"}
"""Value that leaves a key to the planner, where that is not null."""
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
class _RemedyTrial:
    """Holds a change of a recipe that may make it fit, and the options that express it."""

    kind: str
    """Kind of the trial; the first of a kind that fits is proposed."""
    options: str
    changes: dict[str, object]


def with_remedies(
    error: FitError,
    recipe: Recipe,
    machine: Machine,
    plans: _Planner,
    *,
    only_proposed: bool = False,
) -> FitError:
    """Return the same refusal with fixes that were tried: the fix that it already proposes, and
    unless `only_proposed`, removed pins, fewer tokens, more devices, an adapter. Proposals in words
    are kept. If nothing fits, a proposal that leads to another refusal is told with it."""
    fixes: dict[str, str] = {}
    first: list[str] = []
    for trial in _remedy_trials(error, recipe, machine):
        if only_proposed and trial.kind != "proposed":
            break
        if trial.kind in fixes or len(fixes) == _MAX_FIXES:
            continue
        try:
            plan = plans(_changed(recipe, trial.changes))
        except FitError as other:
            if trial.kind == "proposed" and other.what != error.what:
                first.append(f"first {trial.options}; then {other.what}")
            continue
        except (RecipeError, ValueError):  # the recipe cannot be changed so
            continue
        then = f"   # then {summary(plan.trainer)} fits" if "pin" in trial.kind else ""
        then = "   # train an adapter instead of all weights" if trial.kind == "adapter" else then
        fixes[trial.kind] = trial.options + then
    words = [fix for fix in error.fixes if not _parsed(fix)]
    return type(error)(
        error.what,
        why=error.why,
        fix=[*dict.fromkeys(fixes.values()), *words] or [*first, *_manual_remedies(machine)],
    )


def _remedy_trials(error: FitError, recipe: Recipe, machine: Machine) -> Iterator[_RemedyTrial]:
    """Yield trials lazily, the smallest change first."""
    for fix in error.fixes:
        if changes := _parsed(fix):
            yield _RemedyTrial(
                kind="proposed", options=fix.partition("#")[0].strip(), changes=changes
            )
    pinned = [key for key in _PINS if _value(recipe, key) != _FREE.get(key)]
    rooms = [
        [key for key in pinned if key.startswith(section)] for section in ("parallel.", "engines.")
    ]
    for kind, keys in (
        *(("a pin", [key]) for key in pinned),
        *(("pins", some) for some in (*rooms, pinned) if len(some) > 1),
    ):
        changes = {key: _FREE.get(key) for key in keys}
        options = " ".join(f"--set {key}={changes[key] or 'null'}" for key in keys)
        yield _RemedyTrial(kind=kind, options=options, changes=changes)
    visible = min((len(node.devices) for node in machine.nodes), default=0)
    if recipe.machine.gpus and recipe.machine.gpus < visible:
        yield _RemedyTrial(
            kind="gpus", options=f"--gpus {visible}", changes={"machine.gpus": visible}
        )
    if visible and recipe.machine.gpus != 0:
        for nodes in (recipe.machine.nodes * factor for factor in (2, 4, 8, 16, 32, 64)):
            if nodes <= _MAX_NODES:
                yield _RemedyTrial(
                    kind="nodes", options=f"--nodes {nodes}", changes={"machine.nodes": nodes}
                )
    prompts = recipe.rollout.prompts_per_step
    for more in (2 * prompts, 8 * prompts):
        yield _RemedyTrial(
            kind="prompts",
            options=f"--set rollout.prompts_per_step={more}",
            changes={"rollout.prompts_per_step": more},
        )
    for tokens in (recipe.rollout.max_response_tokens // part for part in (2, 4, 8)):
        if tokens >= _MIN_TOKENS:
            key = "rollout.max_response_tokens"
            yield _RemedyTrial(
                kind="tokens", options=f"--set {key}={tokens}", changes={key: tokens}
            )
    if not recipe.train.lora.is_on:
        yield _RemedyTrial(kind="adapter", options="--lora 16", changes={"train.lora.rank": 16})


def _parsed(fix: str) -> dict[str, object]:
    """Return key -> value of the options in a fix; empty if the fix is not a list of options."""
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
    """Return the recipe with the changes. Raises RecipeError or ValueError if it is refused
    then."""
    raw = recipe.model_dump()
    for key, value in changes.items():
        *sections, last = key.split(".")
        place = raw
        for name in sections:
            place = place[name]
        place[last] = value
    changed = Recipe.model_validate(raw)
    refuse(rules(changed, defaultdict(str)))
    return changed


def _manual_remedies(machine: Machine) -> list[str]:
    larger = "--dry-run --on 8xMI355X" if machine.kind == "rocm" else "--dry-run --on 8xB300"
    return [
        f"{larger}   # a machine with more memory, or more nodes of it",
        "--set model.path=FOLDER   # a smaller model",
    ]
