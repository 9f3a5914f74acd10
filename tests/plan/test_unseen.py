"""Plans for what nobody looked at: recipes that ship on machines of any size, and models made up
from published ones with odd heads, experts, layers and vocabularies. Whatever is planned can run,
uses what there is, and whatever is refused is refused with fixes that hold."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from milescli import models
from milescli.core.errors import CheckpointError, FitError
from milescli.models.facts import ModelFacts
from milescli.plan.legal import engine_faults, faults, training_faults
from milescli.plan.make import make_plan
from milescli.plan.search import MIN_CP_TOKENS
from milescli.plan.types import Plan
from milescli.platform.machine import Machine, parse_machine
from milescli.recipe.load import load
from milescli.recipe.schema import Recipe
from milescli.recipe.templates import shipped_shape, template_names
from tests.plan.recipes import make_recipe

DEVICES = (
    "A100",
    "H100",
    "H200",
    "B200",
    "B300",
    "GB200",
    "GB300",
    "MI300X",
    "MI325X",
    "MI350X",
    "MI355X",
)
MACHINES = st.builds(
    lambda nodes, devices, name: f"{nodes}x{devices}x{name}",
    st.sampled_from([1, 1, 2, 3, 4, 8, 16]),
    st.sampled_from([1, 2, 4, 6, 8, 8, 8]),
    st.sampled_from(DEVICES),
)
MADE_FROM = {
    "Qwen/Qwen3-8B": ("num_hidden_layers", "heads", "vocab_size", "tie_word_embeddings"),
    "Qwen/Qwen3-30B-A3B": (
        "num_hidden_layers",
        "heads",
        "vocab_size",
        "num_experts",
        "moe_intermediate_size",
    ),
    "zai-org/GLM-4.5-Air": ("num_hidden_layers", "heads", "vocab_size", "n_routed_experts"),
    "moonshotai/Moonlight-16B-A3B-Instruct": (
        "num_hidden_layers",
        "latent heads",
        "vocab_size",
        "n_routed_experts",
    ),
}
"""Published models, and which of their fields are made up."""
QUICK = settings(
    max_examples=14,
    deadline=None,
    derandomize=True,
    # a failing case is reported as it is: to make it smaller takes minutes
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
FIX = re.compile(r"--(?:set ([a-z_.]+)=(\S+)|(gpus|nodes) (\d+))")


@lru_cache(maxsize=64)
def _shipped(name: str) -> tuple[Recipe, ModelFacts] | None:
    """None for a recipe without a published model, or whose model cannot be trained."""
    recipe = load(name, environ={}, cwd=Path("/"), home=Path("/")).recipe
    shape = shipped_shape(recipe.model.path) if recipe.model.path else None
    facts = models.parse_facts(shape) if shape else None
    return None if facts is None else (recipe, facts)


def _on(recipe: Recipe, machine: Machine) -> Recipe:
    return recipe.model_copy(
        update={"machine": recipe.machine.model_copy(update={"nodes": len(machine.nodes)})}
    )


def with_options(recipe: Recipe, text: str) -> Recipe:
    """As if the options were added to the command."""
    raw = recipe.model_dump()
    for key, value, flag, number in FIX.findall(text):
        *sections, last = (key or f"machine.{flag}").split(".")
        place = raw
        for name in sections:
            place = place[name]
        place[last] = yaml.safe_load(value) if key else int(number)
    return Recipe.model_validate(raw)


def check_plan(plan: Plan, recipe: Recipe, machine: Machine, facts: ModelFacts) -> None:
    """All that an expert would look at first."""
    layout, engines, forecast = plan.trainer, plan.engines, plan.forecast
    per_node = len(machine.nodes[0].devices)
    assert forecast is not None
    assert not [*faults(layout, facts), *training_faults(layout, facts)]
    assert not [
        *engine_faults(facts, tp=engines.tp, ep=engines.ep, attention_dp=engines.attention_dp)
    ]
    for parts in (forecast.training, forecast.rollout):
        assert sum(part.size_bytes for part in parts) == forecast.memory_bytes
        assert all(part.size_bytes >= 0 for part in parts), parts
    assert per_node % layout.tp == 0 or layout.world_size <= per_node, (
        "tensor parallelism over a node's border"
    )
    assert layout.dp * plan.batch.updates_per_step <= plan.batch.num_samples
    assert layout.cp == 1 or plan.batch.max_sequence_tokens >= layout.cp * MIN_CP_TOKENS
    assert engines.max_running_requests >= engines.attention_dp
    assert (
        engines.max_running_requests % engines.attention_dp == 0
        or recipe.engines.max_running_requests
    )
    for engine in range(engines.num):
        nodes = [slot.node for slot in plan.slots if slot.engine == engine]
        assert len(set(nodes)) == math.ceil(engines.tp / per_node), (
            f"engine {engine} spans {sorted(set(nodes))}"
        )
    used = sum(slot.trainer_rank is not None or slot.engine is not None for slot in plan.slots)
    keys = {decision.key for decision in plan.decisions}
    assert used == per_node * len(machine.nodes) or "idle devices" in keys
    seconds = [
        forecast.rollout_s,
        forecast.train_s,
        forecast.step_s,
        *forecast.train_parts_s.values(),
    ]
    assert all(math.isfinite(value) and value >= 0 for value in seconds), seconds
    assert abs(sum(forecast.train_parts_s.values()) - forecast.train_s) < 0.01
    assert {
        "device",
        "placement",
        "trainer.tp",
        "trainer.pp",
        "trainer.dp",
        "engines.tp",
        "engines.num",
    } <= keys
    assert all(decision.reason for decision in plan.decisions)
    assert Plan.from_json(plan.to_json()) == plan


def plan_or_refusal(recipe: Recipe, machine: Machine, facts: ModelFacts) -> Plan | FitError:
    """A refusal whose fixes hold."""
    try:
        plan = make_plan(recipe, machine, facts)
    except FitError as error:
        assert error.what and error.why and error.fixes
        for fix in error.fixes:
            if FIX.match(fix) and "model.path" not in fix:
                make_plan(with_options(recipe, fix.partition("#")[0]), machine, facts)
        return error
    check_plan(plan, recipe, machine, facts)
    return plan


@QUICK
@given(
    name=st.sampled_from(template_names()), machine=MACHINES, staleness=st.sampled_from([0, 0, 2])
)
def test_recipes_that_ship_are_planned_well_on_any_machine(
    name: str, machine: str, staleness: int
) -> None:
    shipped, place = _shipped(name), parse_machine(machine)
    assume(shipped is not None)
    recipe, facts = shipped
    recipe = with_options(_on(recipe, place), f"--set rollout.max_staleness={staleness}")
    plan_or_refusal(recipe, place, facts)


@QUICK
@given(
    model=st.sampled_from(sorted(MADE_FROM)),
    layers=st.sampled_from([1, 2, 5, 31, 60, 127]),
    heads=st.sampled_from([(1, 1), (8, 1), (14, 2), (15, 5), (48, 6), (64, 8)]),
    experts=st.sampled_from([8, 9, 60, 96, 160, 384]),
    width=st.sampled_from([128, 704, 1000, 1408]),
    vocab=st.sampled_from([512, 32000, 151937, 400000]),
    machine=MACHINES,
    response=st.sampled_from([128, 2000, 8192, 60000]),
    samples=st.sampled_from([(1, 2), (3, 5), (32, 8), (256, 16)]),
)
def test_made_up_models_are_planned_well(
    model, layers, heads, experts, width, vocab, machine, response, samples
) -> None:
    shape, fields = dict(shipped_shape(model) or {}), MADE_FROM[model]
    made = {
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "tie_word_embeddings": layers % 2 == 0,
        "num_experts": experts,
        "n_routed_experts": experts,
        "moe_intermediate_size": width,
    }
    shape |= {field: made[field] for field in fields if field in made}
    if "heads" in fields:
        shape |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 128}
    elif "latent heads" in fields:
        shape |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[0]}
    try:
        facts = models.parse_facts(shape)
    except CheckpointError:
        assume(False)
    place = parse_machine(machine)
    rollout = {
        "max_response_tokens": response,
        "prompts_per_step": samples[0],
        "samples_per_prompt": samples[1],
    }
    plan_or_refusal(make_recipe(machine, rollout=rollout), place, facts)


@settings(QUICK, max_examples=14)
@given(
    pins=st.dictionaries(
        st.sampled_from(
            [
                "tp",
                "pp",
                "cp",
                "ep",
                "etp",
                "dp",
                "sequence_parallel",
                "first_stage_layers",
                "last_stage_layers",
            ]
        ),
        st.sampled_from([1, 2, 3, 4, 8, 16, 64]),
        min_size=1,
        max_size=2,
    ),
    engines=st.dictionaries(
        st.sampled_from(["tp", "num", "ep", "attention_dp"]),
        st.sampled_from([1, 2, 3, 8, 16]),
        max_size=1,
    ),
    name=st.sampled_from(
        ["qwen3-8b", "qwen3-30b-a3b", "qwen3.6-35b-a3b", "glm-4.7-flash", "gpt-oss-20b"]
    ),
    machine=st.sampled_from(["1xH200", "8xH100", "2x8xH200", "16x4xGB300"]),
)
def test_pins_are_kept_or_refused_with_fixes_that_hold(
    pins: dict[str, int], engines: dict[str, int], name: str, machine: str
) -> None:
    shipped, place = _shipped(name), parse_machine(machine)
    assert shipped is not None
    recipe, facts = shipped
    wanted: dict[str, object] = {
        key: bool(value % 2) if key == "sequence_parallel" else value for key, value in pins.items()
    }
    raw = _on(recipe, place).model_dump()
    raw["parallel"] |= wanted
    raw["engines"] |= engines
    plan = plan_or_refusal(Recipe.model_validate(raw), place, facts)
    if isinstance(plan, FitError):
        return
    for key, value in wanted.items():
        kept = getattr(plan.trainer, key)
        needless = key == "sequence_parallel" and plan.trainer.tp == 1
        assert kept == value or needless, f"{key}={value} was pinned, and is {kept}"
    for key, value in engines.items():
        assert getattr(plan.engines, key) == value


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3.6-35b-a3b", "glm-4.5"])
def test_more_devices_are_not_slower(name: str) -> None:
    """Beyond what is too close to tell."""
    shipped = _shipped(name)
    assert shipped is not None
    recipe, facts = shipped
    steps = []
    for nodes in (8, 16, 32):
        place = parse_machine(f"{nodes}x8xH200")
        plan = make_plan(_on(recipe, place), place, facts)
        assert plan.forecast is not None
        steps.append(plan.forecast.step_s)
    assert all(after <= 1.15 * before for before, after in pairwise(steps)), steps


def test_longer_responses_and_larger_models_cost_more() -> None:
    machine = parse_machine("8xH200")
    seconds = {}
    for name in ("qwen3-4b", "qwen3-8b", "qwen3-32b"):
        known = _shipped(name)
        assert known is not None
        recipe, facts = known
        for tokens in (2048, 8192, 16384):
            longer = with_options(recipe, f"--set rollout.max_response_tokens={tokens}")
            forecast = make_plan(longer, machine, facts).forecast
            assert forecast is not None
            seconds[name, tokens] = (forecast.train_s, forecast.rollout_s)
    for name in ("qwen3-4b", "qwen3-8b", "qwen3-32b"):
        assert seconds[name, 2048] < seconds[name, 8192] < seconds[name, 16384]
    for tokens in (2048, 8192, 16384):
        assert (
            seconds["qwen3-4b", tokens][0]
            < seconds["qwen3-8b", tokens][0]
            < seconds["qwen3-32b", tokens][0]
        )
