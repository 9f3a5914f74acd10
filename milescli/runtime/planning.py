"""Makes plans: from a recipe, a machine and a model's facts a plan, and from the plan the spec of
each engine. Starts nothing. Called by launch, resume, the dry run, doctor and job scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from milescli.backends.megatron.layer_specs import DEFAULT
from milescli.backends.sglang.launch.servable import fault_of_record
from milescli.backends.sglang.launch.spec import (
    DEQUANTISE,
    EngineSpec,
    refuse_quantised,
    require_served,
)
from milescli.backends.sglang.launch.speculation import Speculation, check_speculation
from milescli.cluster.nodes import planning_machine
from milescli.console.output import Output
from milescli.core.errors import CheckpointError, MemoryTaken, RecipeError
from milescli.models import ModelFacts
from milescli.models.adapter import SOLE_ADAPTER
from milescli.models.base import quantization_config
from milescli.models.catalogue import UNPROVEN
from milescli.plan.choices import num_speculated_tokens
from milescli.plan.make import make_plan
from milescli.plan.roles import QueriedModels
from milescli.plan.types import Plan
from milescli.platform.machine import Machine
from milescli.platform.memory_holders import name_holders
from milescli.recipe.load import LoadedRecipe
from milescli.recipe.schema import Recipe
from milescli.recipe.several import adapter_recipes, recipe_to_plan
from milescli.runtime.inputs.auxiliary_models import (
    draft_path,
    require_channel,
    require_draft,
    require_learning_draft,
    require_policies,
    reward_facts,
    teacher_facts,
)
from milescli.runtime.inputs.model_facts import (
    config_of_recipe,
    planned_facts,
    require_positions,
)
from milescli.runtime.inputs.plugins import load_plugins


def plan_only(
    loaded: LoadedRecipe, machine: Machine | None = None, *, facts: ModelFacts | None = None
) -> Plan:
    """Return the plan, without starting or making anything. Raises if a plug-in or the model does
    not exist, or cannot be trained. `facts`: of the model, if they were read already, since that
    may need the hub."""
    each = adapter_recipes(loaded)
    for one in each.values() or [loaded]:
        load_plugins(one.recipe)
    facts = facts or planned_facts(loaded.recipe)
    machine = machine or planning_machine(loaded)
    return plan_without_plugins(recipe_to_plan(loaded, each), machine, facts=facts)


def plan_without_plugins(loaded: LoadedRecipe, machine: Machine, *, facts: ModelFacts) -> Plan:
    """Return the plan without loading the plug-ins, which imports torch: for callers that use the
    time in between, and load them later."""
    refuse_unrecorded(loaded.recipe, facts)
    if facts.mamba is not None and loaded.recipe.model.layer_spec != DEFAULT:
        raise RecipeError(
            f"`model.layer_spec` cannot change a model of type `{facts.family}`",
            why="Megatron-Core builds all of its layers, including Mamba-2, from one spec",
            fix=f"--set model.layer_spec={DEFAULT}",
        )
    return _make_plan(loaded.recipe, machine, facts)


def _make_plan(recipe: Recipe, machine: Machine, facts: ModelFacts) -> Plan:
    """Make the plan, with all models of the run."""
    require_policies(recipe, facts)
    draft = require_draft(recipe)
    queried = QueriedModels(teachers=teacher_facts(recipe), reward=reward_facts(recipe))
    with naming_memory_users(recipe, machine):
        plan = make_plan(recipe, machine, facts, queried)
    require_channel(plan)
    if recipe.train.draft.is_on and draft is not None:
        require_learning_draft(plan, draft)
    has_adapter = recipe.train.lora.is_on and not plan.merges_adapter
    require_served_by(plan, recipe, facts, has_adapter=has_adapter)
    if plan.engines.num:
        if plan.device_kind == "cpu" and plan.engine_format is None:
            refuse_plain_updates(config_of_recipe(recipe.model))
        require_positions(recipe, facts)
    return plan


@contextmanager
def naming_memory_users(recipe: Recipe, machine: Machine) -> Iterator[None]:
    """If an error about memory that others have taken is raised within the context, add the
    processes that use memory of this computer to it."""
    try:
        yield
    except MemoryTaken as error:
        if recipe.machine.address is not None:
            raise
        node = machine.nodes[0]
        held_bytes = node.memory_bytes - (node.available_bytes or node.memory_bytes)
        raise name_holders(error, held_bytes=held_bytes) from None


def refuse_plain_updates(config: Mapping[str, object]) -> None:
    """Raise RecipeError if engines start from quantised weights, but receive plain ones."""
    if quantization_config(config) is not None:
        raise RecipeError(
            f"the quantised `{config['model_type']}` model cannot be trained in this way",
            why="engines that start from its folder use quantised weights, but with "
            "`rollout.precision` the trainer sends unquantised ones",
            fix=[
                "--set rollout.precision=fp8_block   # or mxfp8, int4, nvfp4: send quantised "
                "weights",
                f"{DEQUANTISE}   # and use the unquantised model",
            ],
        )


def require_served_by(plan: Plan, recipe: Recipe, facts: ModelFacts, *, has_adapter: bool) -> None:
    """Raise MachineError or RecipeError if the plan's engines cannot serve this model, or cannot
    use the recipe's speculative decoding."""
    on_cpu, guessing = plan.device_kind == "cpu", speculation_of(recipe, plan)
    if not plan.engines.num:
        return
    require_served(facts, on_cpu=on_cpu, has_adapter=has_adapter)
    if not on_cpu and guessing is None:
        return
    config, draft = config_of_recipe(recipe.model), draft_path(recipe)
    if on_cpu:
        refuse_quantised(config)
    if guessing is not None:
        check_speculation(
            guessing,
            device_kind=plan.device_kind,
            config=config,
            draft_config=None if draft is None else draft.config(),
            records_experts=recipe.train.routing_replay,
        )


def refuse_unrecorded(recipe: Recipe, facts: ModelFacts) -> None:
    """Raise RecipeError if the recipe replays routing that the engines do not report."""
    fault = fault_of_record(facts) if recipe.train.routing_replay else None
    if fault is not None:
        raise RecipeError(
            f"the routing of a `{facts.family}` model cannot be replayed",
            why="`train.routing_replay` needs the engine's record of the chosen experts, and "
            f"{fault}",
            fix="--set train.routing_replay=false",
        )


def refuse_unproven(recipe: Recipe, facts: ModelFacts) -> None:
    """Raise CheckpointError for a family whose computation could not be verified, unless the recipe
    allows it."""
    why = UNPROVEN.get(facts.family)
    if why and not recipe.model.allow_unproven:
        raise CheckpointError(
            f"training of models of type `{facts.family}` is disabled by default",
            why=why,
            fix="--set model.allow_unproven=true   # then watch the difference of engine - "
            "trainer in the first step",
        )


def replan_fetched(
    plan: Plan, loaded: LoadedRecipe, machine: Machine, facts: ModelFacts, *, output: Output
) -> Plan:
    """Return the plan for the downloaded model: the shape that ships with a recipe may be older
    than the model on the hub."""
    fresh = _make_plan(loaded.recipe, machine, facts)
    if fresh.fingerprint == plan.fingerprint:
        return plan
    output.warn(
        "the model differs slightly from the shape that miles ships, so miles plans again with "
        "its config.json"
    )
    return fresh


def engine_spec(
    recipe: Recipe,
    plan: Plan,
    *,
    index: int,
    port: int,
    model_dir: Path,
    log_dir: Path,
    has_stop: bool = False,
    draft_dir: Path | None = None,
    adapter_dir: Path | None = None,
) -> EngineSpec:
    """Return the part of the spec that is equal on all nodes of engine `index`; `build` adds its
    location. `has_stop`: requests may contain stop strings, for which an engine needs a tokenizer;
    `draft_dir`: the draft model's, if it exists; `adapter_dir`: the initial adapter's, if the
    policy is one."""
    layout, kept = plan.engines, recipe.engines.prefix_cache
    if kept is None and recipe.rollout.agent != "single_turn":
        kept = True
    return EngineSpec(
        name=f"engine {index}",
        model_dir=model_dir,
        tokenizer_dir=model_dir if has_stop else None,
        device_kind=plan.device_kind,
        precision=plan.precision,
        tp=layout.tp,
        ep=layout.ep,
        attention_dp=layout.attention_dp,
        port=port,
        log_path=log_dir / f"engine-{index}-server.log",
        max_running_requests=layout.max_running_requests,
        max_total_tokens=layout.max_total_tokens,
        memory_fraction=layout.memory_fraction,
        context_length=layout.context_length,
        cpu_threads=layout.cpu_threads or plan.cpu_threads,
        seed=recipe.run.seed,
        exact=plan.on_policy == "exact",
        input_format=plan.engine_format if plan.quantises_inputs else None,
        prefix_cache=kept,
        keeps_features=recipe.model.vision == "frozen",
        return_routed_experts=recipe.train.routing_replay,
        speculation=speculation_of(recipe, plan, draft_dir),
        adapter_dir=adapter_dir,
        adapter_names=tuple(recipe.adapters) or (SOLE_ADAPTER,),
        shares_outer=adapter_dir is not None and recipe.train.lora.experts == "shared_outer",
        attention_backend=recipe.engines.attention_backend,
        cuda_graphs=recipe.engines.cuda_graphs,
        extra_args=tuple(recipe.engines.extra),
    )


def speculation_of(recipe: Recipe, plan: Plan, draft_dir: Path | None = None) -> Speculation | None:
    """Return the settings of the policy engines' speculative decoding; None if it is off.
    `draft_dir`: see `engine_spec`."""
    settings = recipe.rollout.speculative
    if settings.kind == "none":
        return None
    return Speculation(
        kind=settings.kind,
        num_guesses=num_speculated_tokens(recipe, on_cpu=plan.device_kind == "cpu")[0],
        draft_dir=draft_dir,
        ngram_breadth=settings.ngram_breadth,
        ngram_length=settings.ngram_length,
    )
