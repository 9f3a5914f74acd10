"""Tasks of an environment of another package as rows of a run: `task:verifiers`, `task:harbor`.
The recipe's `rollout` says which they are, so that they are written before other tasks are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from milescli.agents.harbor import tasks as tasks_of_harbor
from milescli.agents.verifiers import tasks as tasks_of_verifiers
from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import RecipeError
from milescli.recipe.data import Data
from milescli.recipe.data_files import FIELDS, names_in
from milescli.recipe.schema import Rollout
from milescli.rollout.source import file_named
from milescli.rollout.tasks import TASK_PREFIX

HELDOUT = "-heldout"
EVERY = 16
"""One prompt of so many is held out, whatever the seed."""
TASKS: Mapping[str, Callable[[Rollout], list[dict[str, Any]]]] = {
    "verifiers": tasks_of_verifiers,
    "harbor": tasks_of_harbor,
}
"""By the agent that plays them."""


def with_foreign_tasks(data: Data, rollout: Rollout, run: RunDir) -> Data:
    """The same, where tasks of another package are files of the run. Raises RecipeError or
    MachineError where the package does not give them."""
    made: dict[str, str] = {}
    changes: dict[str, object] = {}
    for field in FIELDS:
        named = getattr(data, field)
        names = [_local(name, field, rollout, run, made) for name in names_in(named)]
        if names != names_in(named):
            changes[field] = names[0] if isinstance(named, str) else names
    return data.model_copy(update=changes)


def _local(name: str, field: str, rollout: Rollout, run: RunDir, made: dict[str, str]) -> str:
    file = file_named(name, key=f"data.{field}")
    short = file.name.removeprefix(TASK_PREFIX)
    package = short.removesuffix(HELDOUT)
    if file.name == short or package not in TASKS:
        return name
    if package != rollout.agent:
        raise RecipeError(
            f"`{file.name}` is played by another agent",
            why=f"`rollout.agent` is {rollout.agent}, and labels of these rows are tasks of "
            f"{package}",
            fix=f"--set rollout.agent={package}",
        )
    if short not in made:
        made |= _written(package, TASKS[package](rollout), run)
    return replace(file, name=made[short]).spelled()


def _written(package: str, rows: list[dict[str, Any]], run: RunDir) -> dict[str, str]:
    """Both files, by the names of their tasks."""
    run.data_dir.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[dict[str, Any]]] = {package: [], package + HELDOUT: []}
    places: dict[str, int] = {}
    for row in rows:  # rows of one prompt are on one side
        place = places.setdefault(json.dumps(row["prompt"]), len(places))
        parts[package + HELDOUT * (place % EVERY == EVERY - 1)].append(row)
    made = {}
    for name, part in parts.items():
        path = run.data_dir / f"{name}.jsonl"
        path.write_text(_lines(part), encoding="utf-8")
        made[name] = str(path)
    return made


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
