"""Keys that older recipes have under other names: `run.tensorboard` and `run.wandb_project`, which
`run.trackers` and `run.project` say now. Each layer is translated by itself. Called by `layers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from milescli.core.errors import RecipeError
from milescli.recipe.keys import RecipeKey, keys
from milescli.recipe.tables import Table

TENSORBOARD, WANDB = "run.tensorboard", "run.wandb_project"
TRACKERS, PROJECT = "run.trackers", "run.project"
OLD: Mapping[str, RecipeKey] = {
    TENSORBOARD: RecipeKey(
        name=TENSORBOARD,
        wants="true or false",
        default=True,
        doc="",
        is_text=False,
        is_list=False,
        optional=False,
    ),
    WANDB: RecipeKey(
        name=WANDB, wants="text", default=None, doc="", is_text=True, is_list=False, optional=True
    ),
}
"""Understood, and never written."""


@cache
def readable() -> Mapping[str, RecipeKey]:
    """Every key that a layer may set."""
    return {**keys(), **OLD}


def translated(table: Table) -> Table:
    """The layer without old names. Raises RecipeError where it has one beside the new one, or
    something that the old one never took."""
    old = {name: table[name] for name in OLD if name in table}
    if not old:
        return table
    said = next(iter(old.values()))
    shown = old[TENSORBOARD].value if TENSORBOARD in old else True
    project = old[WANDB].value if WANDB in old else None
    if not isinstance(shown, bool):
        raise RecipeError(
            f"`{TENSORBOARD}` is `{old[TENSORBOARD].text}`",
            why=f"{said.origin}: it was true or false, and `{TRACKERS}` says it now",
            fix=[f"--set '{TRACKERS}=[tensorboard]'", f"--set '{TRACKERS}=[]'"],
        )
    new: dict[str, object] = {TRACKERS: ["tensorboard"] * shown + ["wandb"] * (project is not None)}
    if project is not None:
        new[PROJECT] = project
    made: Table = {name: entry for name, entry in table.items() if name not in old}
    for key, value in new.items():
        if key in made:
            raise RecipeError(
                f"`{next(iter(old))}` and `{key}` are both set",
                why=f"{said.origin} says it the old way, {made[key].origin} the new way",
                fix=f"leave out {' and '.join(f'`{name}`' for name in old)}, and keep `{key}`",
            )
        made[key] = replace(said, value=value, text=str(value))
    return made
