"""Paths that a recipe names, made absolute before the run records them: resume, eval and export may
be called from another folder. Called by launch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from milescli.core.errors import MilesError
from milescli.recipe.load import LoadedRecipe
from milescli.recipe.section import Section
from milescli.recipe.several import KEY as ADAPTERS
from milescli.rollout.source import file_named

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
    )
)
"""Last parts of the keys that may name a file or a folder of this computer."""


def with_absolute_paths(loaded: LoadedRecipe) -> LoadedRecipe:
    """The same recipe; what names nothing that is here (a task, a name on the hub, a file that is
    missing) stays as it is."""
    recipe = _anchored(loaded.recipe, key="")
    return loaded if recipe is loaded.recipe else replace(loaded, recipe=recipe)


def _anchored(value, *, key: str):
    if isinstance(value, Section):
        now = {name: getattr(value, name) for name in type(value).model_fields}
        new = {name: _anchored(one, key=name) for name, one in now.items()}
        changed = {name: one for name, one in new.items() if one is not now[name]}
        return value.model_copy(update=changed) if changed else value
    if isinstance(value, list):
        new = [_anchored(one, key=key) for one in value]
        return new if any(a is not b for a, b in zip(new, value, strict=True)) else value
    if isinstance(value, dict) and (key == ADAPTERS or key.startswith(f"{ADAPTERS}.")):
        new = {name: _anchored(one, key=f"{ADAPTERS}.{name}") for name, one in value.items()}
        return new if any(new[name] is not value[name] for name in new) else value
    last = key.removeprefix(f"{ADAPTERS}.")
    return _absolute(value, key=last) if isinstance(value, str) and last in _KEYS else value


def _absolute(text: str, *, key: str) -> str:
    try:
        file = file_named(text, key=key)
    except MilesError:
        return text  # refused with its key where it is read
    path = Path(file.name).expanduser()
    if (path.is_absolute() and file.name == str(path)) or not path.exists():
        return text
    return replace(file, name=str(path.absolute())).spelled()
