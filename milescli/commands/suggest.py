"""Suggests what the shell offers at TAB: recipes, runs, `--set` keys. It is quick, and silent if
there is nothing to offer."""

from __future__ import annotations


def recipes(incomplete: str) -> list[str]:
    """Suggest names of the built-in recipes; the shell completes paths."""
    from milescli.recipe.templates import template_names

    return [name for name in template_names() if name.startswith(incomplete)]


def algorithms(incomplete: str) -> list[tuple[str, str]]:
    """Suggest names with their descriptions."""
    from milescli.recipe.algorithms import ALGORITHMS

    return [(name, row.about) for name, row in ALGORITHMS.items() if name.startswith(incomplete)]


def overrides(incomplete: str) -> list[tuple[str, str]]:
    """Suggest `train.steps=` with its type; after the equals sign, the choices."""
    from milescli.core.plug_points import POINTS
    from milescli.recipe.keys import keys

    name, equals, value = incomplete.partition("=")
    if equals and name == "train.algorithm":
        return [(f"{name}={choice}", about) for choice, about in algorithms(value)]
    for point in POINTS if equals else ():
        if point.key == name and point.builtin:
            known = map(point.setting, point.names())
            return [(choice, "") for choice in known if choice.startswith(incomplete)]
    if equals and name in keys():
        choices = keys()[name].choices or (
            ("true", "false") if keys()[name].wants.startswith("true") else ()
        )
        return [(f"{name}={choice}", "") for choice in choices if choice.startswith(value)]
    return [(f"{key.name}=", key.wants) for key in keys().values() if key.name.startswith(name)]


def runs(incomplete: str) -> list[str]:
    """Suggest names of the runs in the runs folder."""
    from milescli.commands.find_run import run_names, runs_folder
    from milescli.core.errors import MilesError

    try:
        return [name for name in run_names(runs_folder()) if name.startswith(incomplete)]
    except MilesError:
        return []  # a broken user file is reported by the verb, not at TAB
