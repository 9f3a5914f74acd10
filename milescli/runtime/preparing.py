"""Prepares the inputs of a run, of one policy or of several adapters over one model: each adapter
is a run of its own within the run's directory; all share a plan. Called by launch and resume."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from milescli.checkpoint.run_dir import RunDir, create
from milescli.checkpoint.run_lock import lock
from milescli.checkpoint.store import StoredCheckpoint
from milescli.cluster.nodes import RunNodes
from milescli.console.output import Output
from milescli.models import ModelFacts
from milescli.plan.types import Plan
from milescli.recipe.load import LoadedRecipe
from milescli.recipe.schema import Recipe
from milescli.recipe.several import adapter_recipes, recipe_to_plan
from milescli.runtime.inputs.checks import REWARD
from milescli.runtime.inputs.environment_nodes import require_environments
from milescli.runtime.inputs.input_check_process import InputCheckProcess, check_inputs
from milescli.runtime.inputs.plugins import load_train_plugins
from milescli.runtime.inputs.quick_checks import run_quick_checks
from milescli.runtime.inputs.run_inputs import RunInputs, model_dir_of, prepare_inputs
from milescli.runtime.planning import replan_fetched
from milescli.runtime.recording.run_records import write_records
from milescli.runtime.recovery.stops import check_stopped
from milescli.runtime.spec import RunSpec

ITSELF = ""
"""Name of the policy in a run without named adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipes:
    """Holds a run's recipe, and those of its adapters."""

    loaded: LoadedRecipe
    each: Mapping[str, LoadedRecipe]
    rewards_tried: bool = False
    """True if the user's rewards were called on the first row."""

    @classmethod
    def of(cls, loaded: LoadedRecipe) -> Recipes:
        """Return the recipes of a run. Raises RecipeError."""
        return cls(loaded=loaded, each=adapter_recipes(loaded))

    def without(self, names: Collection[str]) -> Recipes:
        """Return the recipes except those of these adapters."""
        left = {name: one for name, one in self.each.items() if name not in names}
        return replace(self, each=left)

    @property
    def planned(self) -> LoadedRecipe:
        """Return the recipe by which memory is planned."""
        return recipe_to_plan(self.loaded, self.each)

    @property
    def learned(self) -> list[LoadedRecipe]:
        """Return the recipes that are trained: the adapters', or the run's own if it has none."""
        return [*self.each.values()] if self.each else [self.loaded]

    def run_quick_checks(self, facts: ModelFacts) -> None:
        """Make the checks that take no time. `facts`: of the model. Raises the first refusal."""
        for outcome in run_quick_checks(self.loaded, self.each, facts=facts):
            if outcome.refusal is not None:
                raise outcome.refusal

    def checked(self, facts: ModelFacts, *, output: Output) -> Recipes:
        """Check data, tokenizer and rewards in processes, as the dry run does, and load the
        plug-ins of the trainer's ranks in the meantime. Return the recipes, with `rewards_tried`
        set. Raises MilesError."""
        recipes = [one.recipe for one in self.learned]
        # without a tokenizer it is quicker than a process
        checks = (
            []
            if self.loaded.recipe.model.scratch
            else [InputCheckProcess(one, facts) for one in recipes]
        )
        try:
            for recipe in recipes:
                load_train_plugins(recipe)
            made = [one.outcomes() for one in checks] or [
                check_inputs(one, facts) for one in recipes
            ]
        finally:
            for one in checks:
                one.close()
        for outcome in (outcome for each in made for outcome in each):
            if outcome.refusal is not None:
                raise outcome.refusal
            if outcome.name == REWARD.name:
                for doubt in outcome.doubts:
                    output.warn(doubt)
        tried = (
            any(one.name == REWARD.name and not one.not_checked for one in each) for each in made
        )
        return replace(self, rewards_tried=all(tried))


@contextmanager
def adapter_runs(run: RunDir, recipes: Recipes) -> Iterator[dict[str, RunDir]]:
    """Provide the directory of each adapter, created if necessary, and locked."""
    runs = {}
    with ExitStack() as stack:
        for name in recipes.each:
            own = RunDir(run.adapters_dir / name)
            if not own.path.exists() or not any(own.path.iterdir()):
                own = create(base=run.adapters_dir, recipe_name=name, name=name)
            stack.enter_context(lock(own))
            runs[name] = own
        yield runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Holds the parts of a run whose inputs are checked."""

    inputs: RunInputs
    plan: Plan
    """Plan for the model that was found."""
    adapters: Mapping[str, RunSpec]
    """Adapters of the run, as RunSpec holds them."""


def prepare_all(
    recipes: Recipes,
    runs: Mapping[str, RunDir],
    *,
    run: RunDir,
    plan: Plan,
    nodes: RunNodes,
    checkpoints: Mapping[str, StoredCheckpoint | None],
    output: Output,
) -> Prepared:
    """Prepare the run, or each adapter in its own directory of `runs`. Raises as
    `run_inputs.prepare_inputs`. `checkpoints`: from which each adapter continues."""
    check_stopped()
    each = recipes.each or {ITSELF: recipes.loaded}
    if recipes.each:
        model_dir = model_dir_of(recipes.loaded.recipe.model, run, output=output)
        each = {name: _with_model_folder(one, model_dir, run=run) for name, one in each.items()}
    inputs = {
        name: prepare_inputs(
            one.recipe,
            runs.get(name, run),
            output=output,
            rewards_tried=recipes.rewards_tried,
        )
        for name, one in each.items()
    }
    check_stopped()
    for name, one in each.items():
        require_environments(one.recipe, inputs[name], nodes)
    whole = next(iter(inputs.values()))
    plan = replan_fetched(plan, recipes.planned, nodes.machine, whole.facts, output=output)
    nodes.require_shared(run.path, whole.model_dir, *whole.teacher_dirs)
    if not recipes.each:
        return Prepared(inputs=whole, plan=plan, adapters={})
    specs = {
        name: RunSpec(
            run=runs[name],
            recipe=one.recipe,
            plan=_plan_of(one.recipe, plan),
            nodes=nodes,
            inputs=inputs[name],
            past=checkpoints.get(name),
        )
        for name, one in each.items()
    }
    for name, spec in specs.items():
        write_records(spec, each[name])
    shared = replace(whole, prompts=None, heldout=[], demonstrations=[], reports={})
    return Prepared(inputs=shared, plan=plan, adapters=specs)


def _with_model_folder(one: LoadedRecipe, model_dir: Path, *, run: RunDir) -> LoadedRecipe:
    """Return the same recipe with the model that the run has written, so that it is not written
    again for each adapter."""
    if run.path not in model_dir.parents:
        return one
    model = one.recipe.model.model_copy(update={"path": str(model_dir)})
    return replace(one, recipe=one.recipe.model_copy(update={"model": model}))


def _plan_of(recipe: Recipe, plan: Plan) -> Plan:
    """Return the run's plan with this adapter's numbers."""
    batch = replace(
        plan.batch,
        prompts_per_step=recipe.rollout.prompts_per_step,
        samples_per_prompt=recipe.rollout.samples_per_prompt,
        num_samples=recipe.sequences_per_step,
        updates_per_step=recipe.train.updates_per_step,
        max_sequence_tokens=recipe.longest_sequence,
    )
    return replace(plan, batch=batch, steps=recipe.train.steps, warmup_steps=recipe.warmup.steps)
