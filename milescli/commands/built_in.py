"""`miles models`, `recipes`, `algorithms`: the model families and one model in numbers, what can be
trained, and what `train.algorithm` can be."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from milescli.commands import suggest
from milescli.commands.options import verb
from milescli.console.output import Output

MODELS_EXAMPLES = [
    "miles models",
    "miles models Qwen/Qwen3-30B-A3B",
    "miles models ./my-model --json",
    "miles models check ./my-model",
]
CHECK = "check"


@verb("models", examples=MODELS_EXAMPLES, is_page=True)
def models(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a config.json or a name on the hub to describe; or `check`.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="After `check`: the Hugging Face folder to test on this machine.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List the supported model families with their measurements, or show the numbers of one model.
    Or check a folder on this machine: tensor names, both conversions, logits against transformers,
    an engine against the trainer, memory. The check exits with 1 if something fails."""
    from milescli.commands.show.listings import show_families, show_numbers
    from milescli.listings.models import families, numbers

    output: Output = context.obj
    if (model == CHECK) != (folder is not None):
        raise typer.BadParameter("to check a folder, use `miles models check FOLDER`")
    if folder is not None:
        from milescli.doctor.model_check import run_model_check

        raise typer.Exit(run_model_check(folder, output=output))
    if model is None:
        show_families(families(), output=output)
    else:
        show_numbers(numbers(model), output=output)


RECIPES_EXAMPLES = [
    "miles recipes",
    "miles recipes show quickstart",
    "miles recipes show quickstart > my.yaml",
]


class Action(StrEnum):
    """Names the actions on recipes."""

    LIST = "list"
    SHOW = "show"


@verb("recipes", examples=RECIPES_EXAMPLES, is_page=True)
def recipes(
    context: typer.Context,
    action: Annotated[Action, typer.Argument(help="List the recipes, or show one.")] = Action.LIST,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", autocompletion=suggest.recipes, show_default=False),
    ] = None,
) -> None:
    """List the built-in recipes, or show one."""
    from milescli.recipe.layers import read_text
    from milescli.recipe.templates import find_recipe

    output: Output = context.obj
    if action is Action.LIST:
        from milescli.commands.show.listings import show_recipes
        from milescli.listings.recipes import recipe_rows

        show_recipes(recipe_rows(), output=output)
        return
    if name is None:
        raise typer.BadParameter(
            "name the recipe to show: miles recipes show quickstart", param_hint="NAME"
        )
    path = find_recipe(name, cwd=Path.cwd())
    text = read_text(path, what="recipe")
    output.json("recipe", {"name": path.stem, "path": str(path), "text": text})
    output.text(text)


ALGORITHMS_EXAMPLES = [
    "miles algorithms",
    "miles algorithms gspo",
    "miles launch --recipe quickstart --set train.algorithm=gspo",
]


@verb("algorithms", examples=ALGORITHMS_EXAMPLES, is_page=True)
def algorithms(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Show everything that this algorithm sets.",
            autocompletion=suggest.algorithms,
            show_default=False,
        ),
    ] = None,
) -> None:
    """List the RL algorithms with their pieces and papers, or show one."""
    from milescli.commands.show.listings import show_algorithm, show_algorithms
    from milescli.listings.algorithms import algorithm_rows
    from milescli.recipe.algorithms import settings_of

    output: Output = context.obj
    if name is None:
        show_algorithms(algorithm_rows(), output=output)
        return
    settings_of(name)  # refuses a name that is none
    show_algorithm(next(row for row in algorithm_rows() if row.name == name), output=output)
