"""`miles launch`: from a loaded recipe to a finished run. Also the work that `miles resume` goes on
with."""

from __future__ import annotations

import os
import platform as python_platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from milescli import __version__
from milescli.checkpoint.run_dir import create, lock, utc_now, write_json
from milescli.cluster.nodes import find_nodes, planning_machine
from milescli.core.errors import CheckpointError
from milescli.models import ModelFacts
from milescli.models.catalogue import UNPROVEN
from milescli.plan.make import make_plan
from milescli.plan.types import Plan
from milescli.platform.machine import Machine
from milescli.platform.torch_wheel import require_wheel
from milescli.recipe.load import LoadedRecipe
from milescli.recipe.resolved import resolved_yaml
from milescli.recipe.schema import Recipe
from milescli.runtime.inputs import facts_of_recipe, prepare
from milescli.runtime.plugins import load_plugins
from milescli.runtime.spec import RunSpec

if TYPE_CHECKING:
    from milescli.console.output import Output
    from milescli.runtime.train import RunSummary

RECORDED_PACKAGES = ("torch", "sglang", "sglang-router", "megatron-core", "ray", "transformers")


def plan_only(
    loaded: LoadedRecipe, machine: Machine | None = None, *, facts: ModelFacts | None = None
) -> Plan:
    """What would run, without starting or making anything. Raises where the reward or the model
    cannot be had, or cannot be trained. `facts`: of its model, where they were read already: the
    hub may have been asked for them."""
    load_plugins(loaded.recipe)
    facts = facts or facts_of_recipe(loaded.recipe.model)
    facts.require_trainable()
    return make_plan(loaded.recipe, machine or planning_machine(loaded), facts)


def refuse_unproven(recipe: Recipe, facts: ModelFacts) -> None:
    """Raises CheckpointError for a family whose computation nobody could check, unless the recipe
    takes the risk."""
    why = UNPROVEN.get(facts.family)
    if why and not recipe.model.allow_unproven:
        raise CheckpointError(
            f"models of type `{facts.family}` are not trained without your word",
            why=why,
            fix="--set model.allow_unproven=true   # then watch the first step's engine - trainer "
            "difference",
        )


def dry_run(loaded: LoadedRecipe, machine: Machine | None, *, output: Output) -> Plan:
    """What would run here, or on `machine`; what a launch would refuse all the same is a
    warning."""
    facts = facts_of_recipe(loaded.recipe.model)
    plan = plan_only(loaded, machine, facts=facts)
    try:
        refuse_unproven(loaded.recipe, facts)
    except CheckpointError as error:
        output.warn(f"a launch will be refused: {error.what}; {error.why}\n  fix: {error.fixes[0]}")
    return plan


def launch(loaded: LoadedRecipe, *, output: Output) -> RunSummary:
    """Make the run directory, check everything that can be checked, then train. Raises MilesError;
    Stopped where the user asked for the end and the run was saved."""
    from milescli.runtime.train import train

    facts = facts_of_recipe(loaded.recipe.model)
    refuse_unproven(loaded.recipe, facts)
    nodes = find_nodes(loaded, output=output)
    plan = plan_only(loaded, nodes.machine, facts=facts)
    require_wheel(plan.device_kind)
    run = create(
        base=Path(loaded.recipe.run.dir).expanduser(),
        recipe_name=loaded.recipe.name,
        name=loaded.recipe.run.name,
    )
    with lock(run):
        try:
            inputs = prepare(loaded.recipe, run, output=output)
            plan = as_fetched(plan, loaded, nodes.machine, inputs.facts, output=output)
            nodes.require_shared(run.path, inputs.model_dir)
            spec = RunSpec(run=run, recipe=loaded.recipe, plan=plan, nodes=nodes, inputs=inputs)
            write_records(spec, loaded)
        except BaseException:
            run.discard_if_unused()
            raise
        output.note(f"run directory {run.shown}")
        return train(spec, output=output)


def as_fetched(
    plan: Plan, loaded: LoadedRecipe, machine: Machine, facts: ModelFacts, *, output: Output
) -> Plan:
    """The plan for the model that is there: the shape that ships with a recipe may be older than
    the model on the hub."""
    fresh = make_plan(loaded.recipe, machine, facts)
    if fresh.fingerprint == plan.fingerprint:
        return plan
    output.warn(
        "the model is not quite as the shape that ships with miles: planned again by its "
        "config.json"
    )
    return fresh


def write_records(spec: RunSpec, loaded: LoadedRecipe) -> None:
    """recipe.yaml, plan.json and manifest.json."""
    run, model_dir = spec.run, spec.inputs.model_dir
    run.recipe_file.write_text(resolved_yaml(loaded), encoding="utf-8")
    run.plan_file.write_text(spec.plan.to_json(), encoding="utf-8")
    write_json(
        run.manifest_file,
        {
            "created": utc_now(),
            "miles": __version__,
            "packages": {name: version(name) for name in RECORDED_PACKAGES},
            "python": python_platform.python_version(),
            "seed": spec.recipe.run.seed,
            "recipe_sha256": run.recipe_sha256,
            "plan_fingerprint": spec.plan.fingerprint,
            "data": spec.inputs.as_manifest(),
            "model_dir": os.path.relpath(model_dir, run.path)
            if run.path in model_dir.parents
            else str(model_dir),
        },
    )
