"""Several adapters over one model: each as a run of its own within the run's directory, planned and
prepared together. Called by launch and resume."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.checkpoint.run_dir import RunDir, create, lock
from milescli.cluster.nodes import RunNodes
from milescli.models.facts import ModelFacts
from milescli.plan.types import Plan
from milescli.recipe.load import LoadedRecipe
from milescli.recipe.several import each_of, planned
from milescli.runtime.data_inputs import require_files
from milescli.runtime.environment_nodes import require_environments
from milescli.runtime.inputs import RunInputs, model_dir_of, prepare, require_model
from milescli.runtime.planning import as_fetched
from milescli.runtime.plugins import check_at_once, load_train_plugins
from milescli.runtime.records import write_records
from milescli.runtime.spec import RunSpec

if TYPE_CHECKING:
    from milescli.checkpoint.store import StoredCheckpoint
    from milescli.console.output import Output


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipes:
    """What a run's recipe says: of the run, and of each adapter where it trains several."""

    loaded: LoadedRecipe
    each: Mapping[str, LoadedRecipe]

    @classmethod
    def of(cls, loaded: LoadedRecipe, *, steps: int | None = None) -> Recipes:
        """`steps`: of all adapters, whatever they say themselves. Raises RecipeError."""
        return cls(loaded=loaded, each=each_of(loaded, steps=steps))

    def but(self, names: Collection[str]) -> Recipes:
        """Without these adapters."""
        left = {name: one for name, one in self.each.items() if name not in names}
        return Recipes(loaded=self.loaded, each=left)

    @property
    def planned(self) -> LoadedRecipe:
        """What the machine must have room for."""
        return planned(self.loaded, self.each)

    @property
    def learned(self) -> list[LoadedRecipe]:
        """Those that something is learned by."""
        return [*self.each.values()] if self.each else [self.loaded]

    def check_at_once(self) -> None:
        """What takes no time. Raises MilesError."""
        for one in self.learned:
            check_at_once(one.recipe)
            require_files(one.recipe.data)
        require_model(self.loaded.recipe.model)

    def load_plugins(self) -> None:
        """Those of the trainer's ranks. Raises RecipeError."""
        for one in self.learned:
            load_train_plugins(one.recipe)


@contextmanager
def adapter_runs(run: RunDir, recipes: Recipes) -> Iterator[dict[str, RunDir]]:
    """The directory of each adapter, made where it is not there, and locked."""
    runs = {}
    with ExitStack() as held:
        for name in recipes.each:
            own = RunDir(run.adapters_dir / name)
            if not own.path.exists() or not any(own.path.iterdir()):
                own = create(base=run.adapters_dir, recipe_name=name, name=name)
            held.enter_context(lock(own))
            runs[name] = own
        yield runs


def prepare_each(
    recipes: Recipes,
    runs: Mapping[str, RunDir],
    *,
    run: RunDir,
    plan: Plan,
    nodes: RunNodes,
    checkpoints: Mapping[str, StoredCheckpoint | None] | None = None,
    output: Output,
) -> tuple[RunInputs, Plan, dict[str, RunSpec]]:
    """What the run takes in, the plan for the model that is there, and each adapter's spec, whose
    records are written. Raises as `inputs.prepare`. `checkpoints`: where each goes on from."""
    model_dir = model_dir_of(recipes.loaded.recipe.model, run, output=output)
    each = {name: _over(one, model_dir, run=run) for name, one in recipes.each.items()}
    inputs = {name: prepare(one.recipe, runs[name], output=output) for name, one in each.items()}
    first = next(iter(inputs.values()))
    plan = as_fetched(plan, recipes.planned, nodes.machine, first.facts, output=output)
    specs = {}
    for name, one in each.items():
        require_environments(one.recipe, inputs[name], nodes)
        specs[name] = RunSpec(
            run=runs[name],
            recipe=one.recipe,
            plan=_plan_of(one, plan, inputs[name].facts),
            nodes=nodes,
            inputs=inputs[name],
            checkpoint=(checkpoints or {}).get(name),
        )
        write_records(specs[name], one)
    shared = replace(first, prompts=None, heldout=[], demonstrations=[], reports={})
    return shared, plan, specs


def _over(one: LoadedRecipe, model_dir: Path, *, run: RunDir) -> LoadedRecipe:
    """The same; a model that the run has written out is read there, and not once more for each."""
    if run.path not in model_dir.parents:
        return one
    model = one.recipe.model.model_copy(update={"path": str(model_dir)})
    return replace(one, recipe=one.recipe.model_copy(update={"model": model}))


def _plan_of(one: LoadedRecipe, plan: Plan, facts: ModelFacts) -> Plan:
    """The run's, with this adapter's numbers."""
    recipe = one.recipe
    batch = replace(
        plan.batch,
        prompts_per_step=recipe.rollout.prompts_per_step,
        samples_per_prompt=recipe.rollout.samples_per_prompt,
        num_samples=recipe.sequences_per_step,
        updates_per_step=recipe.train.updates_per_step,
        max_sequence_tokens=recipe.longest_sequence,
    )
    return replace(plan, batch=batch, steps=recipe.train.steps, warmup_steps=recipe.warmup.steps)
