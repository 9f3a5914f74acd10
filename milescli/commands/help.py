"""`miles help`: pages that no option list can hold: exit codes, recipe keys, the run directory."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from milescli.checkpoint.run_dir import LAYOUT
from milescli.commands.options import verb
from milescli.console.output import Output
from milescli.core.errors import EXIT_CODE_MEANINGS

EXAMPLES = ["miles help exit-codes", "miles help recipe", "miles help run-directory"]


class Topic(StrEnum):
    """Names the pages."""

    EXIT_CODES = "exit-codes"
    RECIPE = "recipe"
    RUN_DIRECTORY = "run-directory"


TOPICS = {
    Topic.EXIT_CODES: "what the process says when it ends",
    Topic.RECIPE: "every key of a recipe: type, default, meaning",
    Topic.RUN_DIRECTORY: "the files of runs/NAME",
}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "help", examples=EXAMPLES)(help_page)


def help_page(
    context: typer.Context,
    topic: Annotated[Topic | None, typer.Argument(help="Which page.", show_default=False)] = None,
) -> None:
    """Show a page: exit-codes, recipe or run-directory."""
    output: Output = context.obj
    if topic is Topic.EXIT_CODES:
        codes = [(int(code), meaning) for code, meaning in EXIT_CODE_MEANINGS.items()]
        output.json(
            "exit_codes",
            {"exit_codes": [{"code": code, "meaning": meaning} for code, meaning in codes]},
        )
        output.table(["code", "meaning"], codes)
    elif topic is Topic.RECIPE:
        from milescli.commands.show.listings import show_keys

        show_keys(output)
    elif topic is Topic.RUN_DIRECTORY:
        output.json("run_directory", {"files": LAYOUT})
        output.kv(LAYOUT, title="runs/NAME/")
    else:
        output.json("help", {"topics": {str(name): text for name, text in TOPICS.items()}})
        output.table(
            ["page", "what is on it"],
            [(f"miles help {name}", text) for name, text in TOPICS.items()],
        )
