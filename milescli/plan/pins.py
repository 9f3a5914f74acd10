"""Pins of the recipe, each by itself, before any layout is weighed: those that no layout can keep
are refused with the equation. Pure; called by `on_devices`."""

from __future__ import annotations

from collections.abc import Iterator

from milescli.core.errors import FitError
from milescli.models.facts import ModelFacts
from milescli.plan.legal import (
    IllegalValue,
    cp_faults,
    engine_faults,
    expert_faults,
    faults,
    stage_faults,
    tp_faults,
)
from milescli.plan.search_space import divisors
from milescli.plan.types import TrainerLayout
from milescli.recipe.schema import Parallel, Recipe


def check_pins(recipe: Recipe, facts: ModelFacts, num_devices: int) -> None:
    """Raises FitError for the first that cannot be kept."""
    pins = recipe.parallel
    for fault in _pin_faults(pins, facts):
        raise fault.error()
    parts = (pins.tp or 1) * (pins.pp or 1) * (pins.cp or 1)
    if pins.dp is None and num_devices % parts and recipe.engines.placement != "split":
        raise FitError(
            f"tp x pp x cp = {pins.tp or 1} x {pins.pp or 1} x {pins.cp or 1} = {parts} does not "
            f"divide {num_devices} devices",
            why=f"{num_devices} / {parts} is not whole, so ranks would be left over",
            fix=f"--set parallel.dp={max(1, num_devices // parts)}   # leaves devices idle; or pin "
            "a layout that divides",
        )
    _check_engine_pins(recipe, facts, num_devices)


def _check_engine_pins(recipe: Recipe, facts: ModelFacts, num_devices: int) -> None:
    """They leave at least one size of engines."""
    pins, per_node = recipe.engines, num_devices // recipe.machine.nodes
    sizes = [pins.tp] if pins.tp else divisors(num_devices)
    first: IllegalValue | None = None
    for size in sizes:
        ep = pins.ep or (size if facts.num_experts and facts.num_experts % size == 0 else 1)
        fault = next(
            engine_faults(facts, tp=size, ep=ep, attention_dp=pins.attention_dp or 1), None
        )
        if fault is None:
            break
        first = first or fault
    else:
        assert first is not None
        raise first.error()
    if pins.tp and pins.tp > num_devices:
        raise FitError(
            f"an engine of {pins.tp} devices is pinned and there are {num_devices}",
            why=f"engines.tp {pins.tp} > {recipe.machine.nodes} nodes x {per_node} devices = "
            f"{num_devices}",
            fix=f"--set engines.tp={per_node}",
        )
    if pins.tp and recipe.machine.nodes > 1 and pins.tp % per_node and per_node % pins.tp:
        legal = max(size for size in divisors(per_node) if size <= pins.tp)
        raise FitError(
            f"engines of {pins.tp} devices would lie across nodes",
            why=f"a node has {per_node} devices: engines.tp must divide that, or be a multiple of "
            "it",
            fix=f"--set engines.tp={legal}",
        )


def _pin_faults(pins: Parallel, facts: ModelFacts) -> Iterator[IllegalValue]:
    if pins.tp:
        yield from tp_faults(facts, pins.tp)
    if pins.cp:
        yield from cp_faults(facts, pins.cp, tp=pins.tp or 1)
    ends = {
        "first_stage_layers": pins.first_stage_layers,
        "last_stage_layers": pins.last_stage_layers,
    }
    if pins.sequence_parallel is False and facts.num_experts and (pins.tp or 1) > 1:
        yield from faults(TrainerLayout(tp=pins.tp, ep=1, etp=1), facts)
    if pins.pp:
        yield from stage_faults(TrainerLayout(pp=pins.pp, **ends), facts)
    ep, etp = pins.ep or 1, pins.etp or 1
    if facts.num_experts or ep > 1 or etp > 1:
        group = ep * etp
        yield from expert_faults(TrainerLayout(ep=ep, etp=etp, dp=group), facts)
