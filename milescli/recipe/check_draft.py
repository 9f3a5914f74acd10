"""Rules of `train.draft`. Pure; called by `check`. What the draft model has to do with the layout
is `runtime.draft_model`'s to say."""

from __future__ import annotations

from milescli.core.errors import RecipeError
from milescli.recipe.schema import Recipe

_OFF = "--set train.draft.lr=null"


def check_draft(recipe: Recipe) -> None:
    """Raises RecipeError where no draft model could learn."""
    if not recipe.train.draft.is_on:
        return
    kind = recipe.rollout.speculative.kind
    if kind != "draft":
        raise RecipeError(
            "there is no draft model that could learn",
            why=f"`rollout.speculative.kind` is {kind}, and `train.draft.lr` is that of a draft "
            "model",
            fix=[
                _OFF,
                "--set rollout.speculative.kind=draft --set rollout.speculative.model=MODEL",
            ],
        )
    if recipe.weights.channel not in ("auto", "tensor"):
        raise RecipeError(
            "what the draft model learns would not reach the engines",
            why=f"`weights.channel` is {recipe.weights.channel}, which sends the model alone",
            fix=["--set weights.channel=tensor", _OFF],
        )
    if recipe.weights.format != "hf":
        raise RecipeError(
            f"`weights.format={recipe.weights.format}` with a draft model that is trained",
            why="draft models in other formats than their own were never tried",
            fix=["--set weights.format=hf", _OFF],
        )
