"""Number formats in a plan: which side holds what, in how much memory, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from milescli import models
from milescli.core.errors import FitError, RecipeError
from milescli.models.facts import ModelFacts
from milescli.models.precision import FORMATS, Cut
from milescli.plan.make import make_plan
from milescli.plan.memory import memory_of
from milescli.plan.precision import quantised_size
from milescli.plan.search_space import search_space
from milescli.plan.types import EngineLayout, Plan
from milescli.platform.machine import parse_machine
from milescli.recipe.load import load
from milescli.recipe.schema import Recipe
from milescli.recipe.templates import shipped_shape

MOE = "qwen3-30b-a3b"


def planned(name: str, machine: str, **keys: object) -> Plan:
    """A plan of a recipe that ships."""
    recipe, facts = loaded(name, **keys)
    return make_plan(recipe, parse_machine(machine), facts)


def loaded(name: str, **keys: object) -> tuple[Recipe, ModelFacts]:
    """A recipe that ships, and the facts of its model."""
    sets = [f"{key.replace('__', '.')}={value}" for key, value in keys.items()]
    recipe = load(name, sets=sets, environ={}, cwd=Path(), home=Path()).recipe
    shape = shipped_shape(str(recipe.model.path))
    assert shape is not None
    return recipe, models.parse_facts(shape)


def decision(plan: Plan, key: str) -> str:
    """The value that was chosen."""
    return next(each.value for each in plan.decisions if each.key == key)


@pytest.mark.parametrize(
    ("trainer", "rollout", "machine", "formats", "rounds_inputs", "differ"),
    [
        ("fp8_block", "same", "8xH200", ("fp8", "fp8"), True, False),
        ("fp8_block", "bf16", "8xH200", ("fp8", None), True, False),
        ("int4_qat", "same", "8xH100", ("int4", "int4"), False, False),
        ("nvfp4", "same", "8xB200", ("nvfp4", "nvfp4"), True, False),
        ("mxfp8", "same", "8xMI355X", ("mxfp8", "mxfp8"), True, False),
        ("auto", "fp8_block", "8xH200", (None, "fp8"), False, True),
    ],
)
def test_both_sides_have_the_formats_that_the_recipe_asks_for(
    trainer: str,
    rollout: str,
    machine: str,
    formats: tuple[str | None, str | None],
    rounds_inputs: bool,
    differ: bool,
) -> None:
    plan = planned(MOE, machine, train__precision=trainer, rollout__precision=rollout)
    assert (plan.trainer_format, plan.engine_format) == formats
    assert (plan.quantises_inputs, plan.formats_differ) == (rounds_inputs, differ)
    assert plan.precision == "bf16" and Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("name", "machine", "nodes", "formats"),
    [
        ("qwen3-30b-a3b-fp8", "8xH200", 1, ("fp8", "fp8")),
        ("qwen3-30b-a3b-mxfp8", "8xB200", 1, ("mxfp8", "mxfp8")),
        ("qwen3-30b-a3b-mxfp8", "8xMI355X", 1, ("mxfp8", "mxfp8")),
        ("qwen3-30b-a3b-nvfp4", "8xB200", 1, ("nvfp4", "nvfp4")),
        ("deepseek-r1", "8xH200", 16, ("fp8", "fp8")),
        ("glm-5", "8xH200", 16, ("fp8", "fp8")),
        ("kimi-k2.5", "8xH200", 32, ("int4", "int4")),
        ("kimi-k2.6", "8xH200", 32, ("int4", "int4")),
    ],
)
def test_recipes_in_a_format_are_planned_for_their_machines(
    name: str, machine: str, nodes: int, formats: tuple[str, str]
) -> None:
    plan = planned(name, machine, machine__nodes=nodes)
    assert (plan.trainer_format, plan.engine_format) == formats


def test_a_plan_says_what_stays_plain_and_why() -> None:
    plan = planned(MOE, "8xH200", train__precision="fp8_block")
    assert decision(plan, "fp8.matrices") == "18624 of 18674"
    plain = {each.value: each.reason for each in plan.decisions if each.key == "fp8.plain"}
    assert plain["48 x layers.*.mlp.gate"] == "the router chooses experts"


def test_weights_are_counted_to_the_byte() -> None:
    """As folders store them: numbers, and a scale for each block."""
    recipe, facts = loaded(MOE, train__precision="fp8_block")
    layer = FORMATS["fp8"]
    q, k, o = (4096, 2048), (512, 2048), (2048, 4096)
    expert, down = (768, 2048), (2048, 768)
    one = sum(layer.bytes_of(shape) for shape in (q, k, k, o))
    experts = 128 * (2 * layer.bytes_of(expert) + layer.bytes_of(down))
    one += experts
    held = quantised_size(facts, "fp8", cut=Cut(), ep=1, exempt=())
    assert held.size_bytes == 48 * one
    memory = memory_of(recipe, facts)
    plain = 2 * (models.table(facts).num_parameters - held.numbers)
    assert memory.engine_weights(EngineLayout(), size=2) == plain + held.size_bytes
    assert memory.expert_weights(EngineLayout(), size=2) == 48 * experts
    beside = memory.engine_weights(EngineLayout(), size=2, multiplies_plain=True)
    assert beside == 2 * models.table(facts).num_parameters + held.size_bytes


@pytest.mark.parametrize("precision", ["bf16", "fp8_block", "nvfp4"])
def test_each_token_waits_for_the_weights_that_all_tokens_use(precision: str) -> None:
    recipe, facts = loaded(MOE, rollout__precision=precision)
    space = search_space(
        recipe,
        parse_machine("8xB200"),
        models.table(facts),
        devices_per_node=8,
        colocated=True,
        size=2,
    )
    engine = EngineLayout(num=8)
    dense = space.memory.engine_weights(engine, size=2) - space.memory.expert_weights(
        engine, size=2
    )
    step_s, _, _ = space.time.decode_line(engine, space.work, running=8)
    read_s = dense / space.time.device.memory_bandwidth
    assert 0 < read_s < step_s - space.efficiency.decode_step_s


def test_an_mtp_layer_is_counted_where_it_is_held() -> None:
    """Neither trainers that do not train it hold it, nor engines that guess no tokens."""
    recipe, facts = loaded("deepseek-r1")
    lines = models.table(facts)
    held_by_all = [e for e in lines.entries if lines.holds(e) and not e.rule.buffer]
    kept = sum(entry.num_elements for entry in held_by_all)
    held = quantised_size(facts, "fp8", cut=Cut(), ep=1, exempt=())
    engine = memory_of(recipe, facts).engine_weights(EngineLayout(), size=2)
    assert engine == 2 * (kept - held.numbers) + held.size_bytes
    trained = replace(facts, trains_mtp=True)
    ahead = range(facts.num_layers, facts.num_layers + facts.num_mtp_layers)
    both = quantised_size(trained, "fp8", cut=Cut(), ep=1, exempt=()).numbers
    assert both > held.numbers
    of_layer = quantised_size(trained, "fp8", cut=Cut(), ep=1, exempt=(), layers=ahead).numbers
    assert of_layer == both - held.numbers


def test_no_block_crosses_the_ranks_of_either_side() -> None:
    """768 rows of an expert over 4 ranks are no whole blocks of 128."""
    shared = planned(MOE, "8xH200", train__precision="fp8_block", engines__tp=4, engines__ep=4)
    cut = planned(MOE, "8xH200", train__precision="fp8_block", engines__tp=4, engines__ep=1)
    assert decision(shared, "fp8.matrices") == "18624 of 18674"
    assert decision(cut, "fp8.matrices") == "192 of 18674"
    assert any("768 rows over 4 ranks" in each.reason for each in cut.decisions)


@pytest.mark.parametrize(
    ("precision", "machine", "why"),
    [
        ("mxfp8", "8xH200", "compute capability 10.0"),
        ("fp8_block", "8xA100", "compute capability 8.9"),
        ("int4_qat", "8xMI300X", "compute capability 8.0"),
    ],
)
def test_a_device_without_kernels_is_refused(precision: str, machine: str, why: str) -> None:
    with pytest.raises(FitError) as caught:
        planned(MOE, machine, train__precision=precision)
    assert why in caught.value.why
    plan = planned(MOE, machine, train__precision=precision, rollout__precision="bf16")
    assert plan.engine_format is None and plan.trainer_format is not None


def test_two_formats_in_a_row_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"rollout\.precision=int4"):
        planned(MOE, "8xH200", train__precision="fp8_block", rollout__precision="int4")


def test_a_merged_adapter_is_sent_plain_over_rounded_weights() -> None:
    adapter = {"train__lora__rank": 8, "train__lora__publish": "merged"}
    plan = planned("qwen3-8b", "8xH200", train__precision="int4_qat", **adapter)
    assert (plan.trainer_format, plan.engine_format) == ("int4", None)
    assert not plan.formats_differ


def test_rounded_weights_lie_beside_the_weights_unless_they_are_frozen() -> None:
    cut = {"parallel__tp": 2, "parallel__pp": 1}
    plain = planned("qwen3-8b", "8xH200", **cut)
    rounding = planned("qwen3-8b", "8xH200", train__precision="int4_qat", **cut)
    frozen = planned("qwen3-8b", "8xH200", train__precision="int4_qat", train__lora__rank=8, **cut)

    def weights(plan: Plan) -> int:
        assert plan.forecast is not None
        return next(part.size_bytes for part in plan.forecast.training if part.name == "weights")

    assert 1.8 < weights(rounding) / weights(plain) < 2.0
    assert weights(frozen) < 1.1 * weights(plain)
