"""Implements `miles launch`: creates the run directory, writes the files that the run needs into
it, and trains. Paths that the recipe names are made absolute first: resume, eval and export may be
called from another folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.checkpoint.run_dir import RunDir, create
from milescli.checkpoint.run_lock import lock
from milescli.checkpoint.store import write_atomically
from milescli.cluster.nodes import find_nodes
from milescli.console.output import Output
from milescli.core.driver_pipe import report_to_parent
from milescli.core.errors import MilesError
from milescli.data.chat_template import AUTO, CHATML, RAW
from milescli.data.prompt_source import parse_file_name
from milescli.platform.torch_wheel import require_wheel
from milescli.recipe.alerts import with_absolute_commands as anchored_alerts
from milescli.recipe.load import LoadedRecipe, with_steps
from milescli.recipe.resolved import resolved_yaml
from milescli.recipe.section import Section
from milescli.recipe.several import KEY as ADAPTERS
from milescli.runtime.inputs.auxiliary_models import require_weight_store
from milescli.runtime.inputs.model_facts import planned_facts
from milescli.runtime.planning import plan_without_plugins, refuse_unproven
from milescli.runtime.preparing import Recipes, adapter_runs, prepare_all
from milescli.runtime.prestart import prestart_engines, prestart_ray
from milescli.runtime.recording.run_records import write_records
from milescli.runtime.recovery.mirror import require_mirror
from milescli.runtime.recovery.stops import recording_stop
from milescli.runtime.spec import RunSpec

if TYPE_CHECKING:
    from milescli.runtime.train import RunSummary


def launch(loaded: LoadedRecipe, *, output: Output) -> RunSummary:
    """Create the run directory, make all checks that need no device, then train. Raises MilesError;
    Stopped if the user stopped the run and it was saved."""
    recipes = Recipes.of(with_absolute_paths(loaded))
    loaded, planned = recipes.loaded, recipes.planned
    facts = planned_facts(loaded.recipe)
    refuse_unproven(loaded.recipe, facts)
    recipes.run_quick_checks(facts)
    nodes = find_nodes(loaded, output=output)
    plan = plan_without_plugins(planned, nodes.machine, facts=facts)
    require_wheel(plan.device_kind)
    prestart = prestart_engines(loaded.recipe, plan, facts, address=nodes.address)
    with prestart as engines_begun, ExitStack() as stack:
        # torch is imported from here on, beside the warm process
        recipes = recipes.checked(facts, output=output)
        run = stack.enter_context(_new_run(recipes))
        try:
            require_mirror(loaded.recipe, run)
            require_weight_store(loaded.recipe, run)
            ray_begun = prestart_ray(loaded.recipe, plan, nodes, engines_begun)
            prestarted = stack.enter_context(ray_begun)
            runs = stack.enter_context(adapter_runs(run, recipes))
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
        except Exception:
            run.discard_if_unused()
            raise
        from milescli.runtime.train import train

        output.note(f"run directory {run.shown}")
        return train(spec, prestarted=prestarted, output=output)


@contextmanager
def _new_run(recipes: Recipes) -> Iterator[RunDir]:
    """Create and lock the run's directory, and write the recipe into it, so that `miles resume` can
    start a run that was stopped before its first attempt."""
    recipe, resolved = recipes.loaded.recipe, resolved_yaml(recipes.loaded)
    run = create(
        base=Path(recipe.run.dir).expanduser(),
        recipe_name=recipe.name,
        name=recipe.run.name,
    )
    with lock(run), recording_stop(run, num_steps=recipe.train.steps):
        write_atomically(run.recipe_file, resolved)
        report_to_parent(run=run.path)
        yield run


_KEYS = frozenset(
    (
        "path",
        "adapter",
        "prompts",
        "demonstrations",
        "train",
        "validation",
        "eval",
        "vocabulary",
        "corpus",
        "chat_template",
        "judge.prompt",
        "code.packages",
        "speculative.model",
        "harbor.tasks",
        "policy",
    )
)
"""Ends of the keys that may name a local file or folder."""
_NO_FILES = {"chat_template": (AUTO, RAW, CHATML), "packages": ("own",)}
"""Values that name no file, even if there is one of that name."""


_MCP_COMMAND = re.compile(r"\.mcp\..+\.command\Z")
"""Keys of programs, some of whose words may name local files."""


def with_absolute_paths(loaded: LoadedRecipe) -> LoadedRecipe:
    """Return the same recipe with absolute paths. Values that do not name an existing local file (a
    task, a name on the hub, a missing file) stay as they are."""
    recipe = _anchored(loaded.recipe, key="")
    return loaded if recipe is loaded.recipe else replace(loaded, recipe=recipe)


def _anchored(value, *, key: str):
    if isinstance(value, Section):
        now = {name: getattr(value, name) for name in type(value).model_fields}
        new = {name: _anchored(one, key=f"{key}.{name}") for name, one in now.items()}
        changed = {name: one for name, one in new.items() if one is not now[name]}
        return value.model_copy(update=changed) if changed else value
    if key.endswith(".alerts") and isinstance(value, list):
        return anchored_alerts(value)
    if isinstance(value, list):
        is_command = _MCP_COMMAND.search(key)
        new = [_absolute_word(one) if is_command else _anchored(one, key=key) for one in value]
        return new if any(a is not b for a, b in zip(new, value, strict=True)) else value
    if isinstance(value, dict) and (
        key.startswith(f".{ADAPTERS}") or any(isinstance(one, Section) for one in value.values())
    ):
        new = {name: _anchored(one, key=f"{key}.{name}") for name, one in value.items()}
        return new if any(new[name] is not value[name] for name in new) else value
    last = key.rpartition(".")[2]
    names_file = last in _KEYS or ".".join(key.split(".")[-2:]) in _KEYS
    if not isinstance(value, str) or not names_file or value in _NO_FILES.get(last, ()):
        return value
    return _absolute(value, key=last)


def _absolute_word(word: str) -> str:
    """Return a word of a command with an absolute path if it names a local file; a bare name, such
    as `python`, is found on PATH."""
    may_be_file = ("/" in word or "." in word) and not os.path.isabs(word)
    return os.path.abspath(word) if may_be_file and os.path.isfile(word) else word


def _absolute(text: str, *, key: str) -> str:
    try:
        file = parse_file_name(text, key=key)
    except MilesError:
        return text  # refused with its key where it is read
    # of os.path, which takes what is no possible path for one that does not exist
    path = Path(os.path.expanduser(file.name))
    if (path.is_absolute() and file.name == str(path)) or not os.path.exists(path):
        return text
    return replace(file, name=str(path.absolute())).spelled()
