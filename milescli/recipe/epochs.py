"""How many steps so many passes over the rows are."""

from __future__ import annotations

import math
from dataclasses import replace

from milescli.core.errors import RecipeError
from milescli.recipe.check import check
from milescli.recipe.load import LoadedRecipe
from milescli.recipe.tables import SettingsLayer


def refuse_two_lengths(loaded: LoadedRecipe) -> None:
    """Raises RecipeError where a recipe that begins sets steps and epochs."""
    origin = loaded.origins["train.steps"]
    epochs = loaded.recipe.train.epochs
    if epochs is not None and origin.layer is not SettingsLayer.DEFAULT:
        raise RecipeError(
            "the recipe says twice how long to train",
            why=f"`train.epochs` is {epochs:g}, and `train.steps` is "
            f"{loaded.recipe.train.steps} ({origin})",
            fix=["--set train.epochs=null", f"leave `train.steps` out of {origin}"],
        )


def with_steps(loaded: LoadedRecipe, num_rows: int) -> LoadedRecipe:
    """`train.steps` set by `train.epochs`, where that is set; a resumed run has its steps. Raises
    RecipeError where the steps do not go with the rest."""
    train = loaded.recipe.train
    if train.epochs is None:
        return loaded
    steps = max(1, math.ceil(train.epochs * num_rows / train.batch_size))
    recipe = loaded.recipe.model_copy(update={"train": train.model_copy(update={"steps": steps})})
    origins = {**loaded.origins, "train.steps": loaded.origins["train.epochs"]}
    return replace(loaded, recipe=recipe, origins=origins, warnings=check(recipe, origins))
