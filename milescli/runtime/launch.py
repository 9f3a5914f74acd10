"""`miles launch`: from a loaded recipe to a finished run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.checkpoint.run_dir import RunDir, create
from milescli.checkpoint.run_lock import lock
from milescli.cluster.nodes import find_nodes
from milescli.core.driver_pipe import say
from milescli.platform.torch_wheel import require_wheel
from milescli.recipe.load import LoadedRecipe, refuse_two_lengths, with_steps
from milescli.runtime.anchoring import with_absolute_paths
from milescli.runtime.inputs import planned_facts
from milescli.runtime.planning import plan_without_plugins, refuse_unproven
from milescli.runtime.preparing import Recipes, adapter_runs, prepare_all
from milescli.runtime.prestart import prestart_engines, prestart_ray
from milescli.runtime.records import write_records
from milescli.runtime.spec import RunSpec

if TYPE_CHECKING:
    from milescli.console.output import Output
    from milescli.runtime.train import RunSummary


def launch(loaded: LoadedRecipe, *, output: Output) -> RunSummary:
    """Make the run directory, check everything that can be checked, then train. Raises MilesError;
    Stopped where the user asked for the end and the run was saved."""
    refuse_two_lengths(loaded)
    recipes = Recipes.of(with_absolute_paths(loaded))
    loaded, planned = recipes.loaded, recipes.planned
    facts = planned_facts(loaded.recipe)
    refuse_unproven(loaded.recipe, facts)
    nodes = find_nodes(loaded, output=output)
    plan = plan_without_plugins(planned, nodes.machine, facts=facts)
    require_wheel(plan.device_kind)
    begun = prestart_engines(loaded.recipe, plan, facts, address=nodes.address)
    with begun as engines_begun, _new_run(recipes) as run, ExitStack() as held:
        try:
            ray_begun = prestart_ray(loaded.recipe, plan, nodes, engines_begun)
            prestarted = held.enter_context(ray_begun)
            # torch is imported from here on, beside the warm process
            recipes.load_plugins()
            runs = held.enter_context(adapter_runs(run, recipes))
            made = prepare_all(
                recipes, runs, run=run, plan=plan, nodes=nodes, checkpoints={}, output=output
            )
            plan = made.plan
            if made.inputs.rows is not None:
                loaded = with_steps(loaded, len(made.inputs.rows))
                plan = replace(plan, steps=loaded.recipe.train.steps)
            spec = RunSpec(
                run=run,
                recipe=loaded.recipe,
                plan=plan,
                nodes=nodes,
                inputs=made.inputs,
                adapters=made.adapters,
            )
            write_records(spec, loaded)
            say(run=run.path)
        except BaseException:
            run.discard_if_unused()
            raise
        from milescli.runtime.train import train

        output.note(f"run directory {run.shown}")
        return train(spec, prestarted=prestarted, output=output)


@contextmanager
def _new_run(recipes: Recipes) -> Iterator[RunDir]:
    """Its directory, locked; made when all that can be refused at once has been looked at."""
    recipes.check_at_once()
    recipe = recipes.loaded.recipe
    run = create(
        base=Path(recipe.run.dir).expanduser(),
        recipe_name=recipe.name,
        name=recipe.run.name,
    )
    with lock(run):
        yield run
