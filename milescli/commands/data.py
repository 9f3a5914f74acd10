"""`miles data`: look at data before a run does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from milescli.commands.options import SetOption, here, verb
from milescli.console.output import Output
from milescli.core.errors import DataError

EXAMPLES = [
    "miles data check train.jsonl",
    "miles data check train.parquet --prompt-key problem --model ./Qwen3-0.6B",
    "miles data check quickstart",
    "miles data check my.yaml --set data.prompts=other.csv --json",
]
PAGE = """\
miles data: look at data before a run does

  miles data check FILE       its columns, bad rows by line, repeated prompts, lengths
  miles data check RECIPE     all of a recipe's data, in tokens, with its reward and its leaks

Nothing is written, and no device is taken.
"""
RECIPE_SUFFIXES = (".yaml", ".yml")


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Look at data before a run does.")
    group.callback(invoke_without_command=True)(page)
    verb(group, "check", examples=EXAMPLES)(check)
    app.add_typer(group, name="data")


def page(context: typer.Context) -> None:
    """Look at data before a run does."""
    if context.invoked_subcommand is None:
        context.obj.text(PAGE)


def check(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            metavar="FILE|RECIPE",
            help="A data file, `hf:NAME:SPLIT`, `task:NAME`; or a recipe.",
            show_default=False,
        ),
    ],
    *,
    sets: SetOption = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="A folder whose tokenizer is used.")
    ] = None,
    prompt_key: Annotated[
        str | None, typer.Option("--prompt-key", help="FILE: the column of the prompt.")
    ] = None,
    label_key: Annotated[
        str | None, typer.Option("--label-key", help="FILE: the column of the label.")
    ] = None,
) -> None:
    """Show what a run would see of a file, or of a recipe's data. Ends with 3 where it would be
    refused."""
    from milescli.commands.show.data import show_data
    from milescli.recipe.load import load
    from milescli.recipe.templates import ALIASES, template_names

    output: Output = context.obj
    is_recipe = what.endswith(RECIPE_SUFFIXES) or what in (*template_names(), *ALIASES)
    if is_recipe and (prompt_key or label_key):
        raise typer.BadParameter("a recipe has its own: --set data.prompt_key=COLUMN")
    if not is_recipe and sets:
        raise typer.BadParameter("--set belongs to a recipe; a file takes --prompt-key")
    loaded = load(what, sets=sets or [], **here()) if is_recipe else None
    from milescli.runtime.inputs import data_check

    try:
        checked = (
            data_check.check_recipe(loaded.recipe, model=model, output=output)
            if loaded
            else data_check.check_file_alone(
                what, prompt_key=prompt_key, label_key=label_key, model=model, output=output
            )
        )
        show_data(checked, output=output)
        if checked.problems:
            raise checked.problems[0]
    except DataError as error:
        if is_recipe:
            raise
        fixes = [_for_file(fix, what) for fix in error.fixes]
        raise DataError(error.what, why=error.why, fix=fixes) from None


_KEY = re.compile(r"--set data\.(prompt|label)_key=")
_FILE = re.compile(r"--set data\.prompts=")


def _for_file(fix: str, what: str) -> str:
    """Return the fix of a recipe as one for the file alone, which has no recipe to set keys of."""
    if _KEY.match(fix):
        option = _KEY.sub(r"--\1-key ", fix)
        return f"miles data check {shlex.quote(what)} {option}"
    return _FILE.sub("miles data check ", fix) if _FILE.match(fix) else fix
