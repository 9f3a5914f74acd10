"""What engines are kept apart for: they sample nothing that is learned from. In a plan they are its
last ones: one for evaluations, where they have their own, then one for each model that plays roles.
Pure."""

from __future__ import annotations

from milescli.recipe.schema import Recipe


def apart_for(recipe: Recipe) -> str:
    """In words, to be put behind a number of engines."""
    roles = "roles that other models play"
    if recipe.eval.engines != "own":
        return roles
    return f"evaluations and {roles}" if recipe.rollout.policies else "evaluations"


def keys_of_apart(recipe: Recipe) -> str:
    """Which keys of the recipe ask for them."""
    keys = ["`eval.engines` is own"] if recipe.eval.engines == "own" else []
    keys += ["`rollout.roles` has a `policy`"] if recipe.rollout.policies else []
    return " and ".join(keys)
