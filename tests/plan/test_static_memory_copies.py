"""Main memory that copies of the trainer's state take: planned, told, and refused with the key that
gives it back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from milescli.core.errors import FitError
from milescli.core.units import GIB
from milescli.plan.make import make_plan
from milescli.plan.static_memory import STATE_COPIES, copies_bytes
from milescli.plan.types import Plan
from milescli.platform.machine import parse_machine
from milescli.recipe.load import load
from milescli.runtime.inputs.model_facts import facts_of_recipe

COPIES = "fault.copy_every=5"


def _plan(name: str, *sets: str, on: str, memory_gib: float) -> Plan:
    recipe = load(name, sets=list(sets), environ={}, cwd=Path("/"), home=Path("/")).recipe
    machine = parse_machine(on)
    nodes = [replace(node, memory_bytes=int(memory_gib * GIB)) for node in machine.nodes]
    return make_plan(recipe, replace(machine, nodes=nodes), facts_of_recipe(recipe.model))


def _reasons(plan: Plan) -> dict[str, str]:
    return {made.key: made.reason for made in plan.decisions}


def test_they_are_three_times_weights_and_optimizer_of_each_model_and_its_reference() -> None:
    assert copies_bytes((10, 99, 30), has_critic=False, reference=0) == STATE_COPIES * 40
    assert copies_bytes((10, 99, 30), has_critic=True, reference=10) == STATE_COPIES * 90


@pytest.mark.parametrize(("on", "sets"), [("1xH100", ["machine.gpus=0"]), ("8xH100", [])])
def test_without_the_key_nothing_is_planned_nor_told(on: str, sets: list[str]) -> None:
    plan = _plan("qwen3-0.6b", *sets, on=on, memory_gib=512)
    assert "fault.copy_every" not in _reasons(plan)
    assert "copies" not in _reasons(plan).get("memory", "")


def test_on_a_cpu_they_are_part_of_the_sum_and_refused_with_it() -> None:
    name, cpu = "qwen3-0.6b", ("machine.gpus=0", "rollout.prompts_per_step=4")
    reasons = _reasons(_plan(name, *cpu, COPIES, on="1xH100", memory_gib=64))
    assert "+ copies 20." in reasons["memory"], "0.6B of 12 bytes, three times"
    assert "a process beside" in reasons["fault.copy_every"]
    _plan(name, *cpu, on="1xH100", memory_gib=24)
    with pytest.raises(FitError, match="main memory") as caught:
        _plan(name, *cpu, COPIES, on="1xH100", memory_gib=24)
    assert "copies 20." in caught.value.why
    assert "--set fault.copy_every=0" in caught.value.fixes


def test_on_devices_they_are_refused_where_main_memory_is_short() -> None:
    reasons = _reasons(_plan("qwen3-8b", COPIES, on="8xH100", memory_gib=2048))
    assert "GiB of a node's main memory" in reasons["fault.copy_every"]
    _plan("qwen3-8b", on="8xH100", memory_gib=300)
    with pytest.raises(FitError) as caught:
        _plan("qwen3-8b", COPIES, on="8xH100", memory_gib=300)
    assert "of it for `fault.copy_every`" in caught.value.why
    assert "--set fault.copy_every=0" in caught.value.fixes
