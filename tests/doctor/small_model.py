"""A recipe whose model is made in a moment, and what the checks of a recipe find: for the tests of
this room."""

from __future__ import annotations

from milescli.doctor.finding import Finding, run_checks
from milescli.doctor.recipe_checks import recipe_checks
from milescli.platform.machine import parse_machine
from milescli.recipe.load import LoadedRecipe
from milescli.recipe.schema import Recipe

SMALL = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 32,
    "ffn_hidden_size": 32,
    "vocab_size": 300,
}


def small_recipe(data: dict[str, object] | None = None, **sections: object) -> Recipe:
    """Of the small model; `data` and `sections` are added to it."""
    return Recipe.model_validate(
        {"model": {"scratch": SMALL}, "data": {"prompts": "task:sums", **(data or {})}, **sections}
    )


def checked(recipe: Recipe) -> dict[str, Finding]:
    """What the checks of a recipe find on a CPU, by the name of the check."""
    loaded = LoadedRecipe(recipe=recipe, origins={}, source="test")
    findings = run_checks(recipe_checks(loaded, machine=lambda: parse_machine("cpu")))
    return {finding.check: finding for finding in findings}
