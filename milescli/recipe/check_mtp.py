"""Rules of `train.mtp`. Pure; called by `check`. What the model has to do with it is
`models.mtp`'s to say."""

from __future__ import annotations

from milescli.core.errors import RecipeError
from milescli.recipe.schema import Recipe

_OFF = "--set train.mtp.loss_weight=null"


def check_mtp(recipe: Recipe) -> None:
    """Raises RecipeError."""
    mtp = recipe.train.mtp
    if not mtp.is_on:
        if mtp.trains_trunk:
            raise RecipeError(
                "`train.mtp.trains_trunk` is true, and there is no loss that could",
                why="`train.mtp.loss_weight` is off",
                fix=["--set train.mtp.loss_weight=0.1", "--set train.mtp.trains_trunk=false"],
            )
        return
    if recipe.trains_scores:
        raise RecipeError(
            f"`train.objective={recipe.train.objective}` trains no MTP layer",
            why="its model gives scores, and predicts no token",
            fix=_OFF,
        )
    if recipe.train.lora.is_on:
        raise RecipeError(
            "an MTP layer is not trained beside an adapter",
            why="with `train.lora.rank` the model's own weights, the layer's too, stay as they "
            "are, and are neither saved nor sent to engines",
            fix=[_OFF, "--set train.lora.rank=null"],
        )
    if recipe.weights.channel == "distributed":
        raise RecipeError(
            "what the MTP layer learns would not reach the engines",
            why="`weights.channel` is distributed, by which SGLang updates the model alone, "
            "without its MTP layer",
            fix=["--set weights.channel=tensor", _OFF],
        )
    if recipe.weights.format != "hf":
        raise RecipeError(
            f"`weights.format={recipe.weights.format}` with an MTP layer that is trained",
            why="MTP layers in other formats than the model's own were never tried",
            fix=["--set weights.format=hf", _OFF],
        )
