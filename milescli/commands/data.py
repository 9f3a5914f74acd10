"""`miles data`: look at data before a run does."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from milescli.commands.options import Group, SetOption, recipe_environment, verb
from milescli.console.output import Output
from milescli.core.errors import DataError

EXAMPLES = [
    "miles data check train.jsonl",
    "miles data check train.parquet --prompt-key problem --model ./Qwen3-0.6B",
    "miles data check train.jsonl --set data.ignore_columns=images",
    "miles data check quickstart",
    "miles data check my.yaml --set data.prompts=other.csv --json",
]
PAGE = """\
miles data: check data before a run uses it

  miles data check FILE       show layout, columns, bad rows, repeated prompts and lengths
  miles data check RECIPE     check all data of a recipe: tokens, reward, train/test overlap

The check writes nothing and uses no device.
"""
RECIPE_SUFFIXES = (".yaml", ".yml")


GROUP = Group("data", about="Check data before a run uses it.", page=PAGE)


@verb("check", examples=EXAMPLES, group=GROUP)
def check(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            metavar="FILE|RECIPE",
            help="A data file, `hf:NAME:SPLIT` or `task:NAME`; or a recipe.",
            show_default=False,
        ),
    ],
    *,
    sets: SetOption = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="Folder of the model whose tokenizer to use.")
    ] = None,
    prompt_key: Annotated[
        str | None, typer.Option("--prompt-key", help="FILE: the column that holds the prompt.")
    ] = None,
    label_key: Annotated[
        str | None, typer.Option("--label-key", help="FILE: the column that holds the label.")
    ] = None,
) -> None:
    """Show what a run would read from a file or from a recipe's data. Exits with 3 if a run would
    reject the data."""
    from milescli.commands.show.data import show_data
    from milescli.recipe.load import load
    from milescli.recipe.templates import ALIASES, template_names

    output: Output = context.obj
    is_recipe = what.endswith(RECIPE_SUFFIXES) or what in (*template_names(), *ALIASES)
    if is_recipe and (prompt_key or label_key):
        raise typer.BadParameter("a recipe has its own: --set data.prompt_key=COLUMN")
    given = {} if is_recipe else _given(sets or [], prompt_key=prompt_key, label_key=label_key)
    loaded = load(what, sets=sets or [], **recipe_environment()) if is_recipe else None
    from milescli.runtime.inputs import data_check

    try:
        checked = (
            data_check.check_recipe(loaded.recipe, model=model, output=output)
            if loaded
            else data_check.check_file_alone(
                what,
                prompt_key=prompt_key,
                label_key=label_key,
                model=model,
                output=output,
                settings={name.removeprefix(_DATA): value for name, value in given.items()},
            )
        )
        show_data(checked, output=output)
        if checked.problems:
            raise checked.problems[0]
    except DataError as error:
        if is_recipe and model is None:
            raise
        fixes = [
            fix.replace(f"--set {_MODEL}=", "--model ")
            if is_recipe
            else _for_file(fix, what, given, model=model)
            for fix in error.fixes
        ]
        raise DataError(error.what, why=error.why, fix=fixes) from None


_DATA, _MODEL = "data.", "model.path"
_OPTIONS = {"data.prompt_key": "--prompt-key", "data.label_key": "--label-key"}
_FILES = ("data.prompts", "data.train")


def _given(sets: list[str], *, prompt_key: str | None, label_key: str | None) -> dict[str, object]:
    """Return the keys of `data` that the command line sets for a file. Raises BadParameter for a
    key that belongs to a recipe, and RecipeError for a value of the wrong type."""
    from milescli.recipe.keys import keys
    from milescli.recipe.layers import from_command_line
    from milescli.recipe.load import validate

    table = from_command_line(sets, {})
    if other := next((name for name in table if not _is_of_a_file(name)), None):
        raise typer.BadParameter(
            f"`{other}` belongs to a recipe; with a file, only keys of `data` can be set"
        )
    validate(table)
    options = dict(zip(_OPTIONS, (prompt_key, label_key), strict=True))
    assert set(options) <= set(keys()), options
    return {name: value for name, value in options.items() if value is not None} | {
        name: entry.value for name, entry in table.items()
    }


def _is_of_a_file(name: str) -> bool:
    from milescli.recipe.data_files import FIELDS

    return name.startswith(_DATA) and name.removeprefix(_DATA) not in (*FIELDS, "mix")


def _for_file(fix: str, what: str, given: dict[str, object], *, model: Path | None) -> str:
    """Return the fix of a recipe as one for the file alone, which has no recipe to set keys of."""
    option, _, comment = fix.partition("   #")
    try:
        words = shlex.split(option)
    except ValueError:
        return fix
    if len(words) != 2 or words[0] != "--set" or not words[1].startswith((_DATA, _MODEL)):
        return fix
    name, _, value = words[1].partition("=")
    file = value if name in _FILES else what
    folder = value if name == _MODEL else model
    settings = given if name in (*_FILES, _MODEL) else {**given, name: value}
    command = ["miles", "data", "check", file]
    for key, setting in settings.items():
        text = f"[{', '.join(setting)}]" if isinstance(setting, list) else str(setting)
        command += [_OPTIONS[key], text] if key in _OPTIONS else ["--set", f"{key}={text}"]
    command += ["--model", str(folder)] if folder is not None else []
    return shlex.join(command) + (f"   #{comment}" if comment else "")
