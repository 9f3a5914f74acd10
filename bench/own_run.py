"""What miles itself would start for a recipe on this machine: the plan, and a session in which a
benchmark starts engines or ranks by it. Imported by the side of miles alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from milescli.checkpoint.run_dir import create
from milescli.cluster.nodes import find_nodes
from milescli.console.output import Mode, Output
from milescli.data.scratch_tokenizer import make_scratch_tokenizer
from milescli.plan.types import Plan
from milescli.recipe.load import LoadedRecipe, load
from milescli.runtime.inputs.run_inputs import prepare_inputs
from milescli.runtime.planning import plan_only
from milescli.runtime.prestart import Prestarted
from milescli.runtime.session import RunSession, open_session
from milescli.runtime.spec import RunSpec


def load_recipe(recipe: dict[str, object], folder: Path) -> LoadedRecipe:
    """The recipe as a user would write it, without the user's own settings. JSON is YAML too."""
    file = folder / "bench.yaml"
    file.write_text(json.dumps(recipe), encoding="utf-8")
    return load(str(file), environ={}, cwd=folder, home=folder)


def plan_of(recipe: dict[str, object], folder: Path) -> Plan:
    """What would run here."""
    return plan_only(load_recipe(recipe, folder))


@contextmanager
def open_run(recipe: dict[str, object], folder: Path) -> Iterator[tuple[RunSpec, RunSession]]:
    """A run directory in `folder`, and Ray; nothing of the run is started. The model's folder gets
    a tokenizer, by which it is a model that a recipe can name."""
    loaded, output = load_recipe(recipe, folder), Output(Mode.QUIET)
    model = loaded.recipe.model.path
    assert model is not None
    make_scratch_tokenizer(["1 + 2 = 3"], 300, model)
    nodes = find_nodes(loaded, output=output)
    plan = plan_only(loaded, nodes.machine)
    run = create(base=folder / "runs", recipe_name="bench", name=None)
    inputs = prepare_inputs(loaded.recipe, run, output=output)
    spec = RunSpec(run=run, recipe=loaded.recipe, plan=plan, nodes=nodes, inputs=inputs)
    with open_session(spec, prestarted=Prestarted(), log_dir=run.new_attempt()) as session:
        yield spec, session
