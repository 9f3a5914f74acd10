"""`miles recipes`: what can be trained."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from milescli.commands import suggest
from milescli.commands.options import verb
from milescli.console.output import Output

EXAMPLES = [
    "miles recipes",
    "miles recipes show quickstart",
    "miles recipes show quickstart > my.yaml",
]


class Action(StrEnum):
    """Names the actions on recipes."""

    LIST = "list"
    SHOW = "show"


@verb("recipes", examples=EXAMPLES, is_page=True)
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
