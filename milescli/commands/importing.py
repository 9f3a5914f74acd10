"""`miles import`: make a recipe of another framework's configuration."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from milescli.commands.options import verb
from milescli.console.output import Output
from milescli.core.errors import MachineError, RecipeError

EXAMPLES = [
    "miles import run_qwen3-8b.sh --to mine.yaml",
    "miles import models/qwen3-4B.sh run-qwen3-4B.sh --from slime --to mine.yaml",
    "miles import ppo_trainer.yaml data.train_batch_size=256 --to mine.yaml",
]
FilesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE...",
        help="Shell scripts, YAML, TOML, Python files or notebooks; later ones override earlier "
        "ones; and KEY=VALUE words as on the script's command line.",
        show_default=False,
    ),
]


@verb("import", examples=EXAMPLES)
def import_(
    context: typer.Context,
    files: FilesArgument,
    *,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="Recipe to write; or stdout."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NAME",
            help="verl, slime, miles, trl, prime-rl, roll or openrlhf; recognised by default.",
        ),
    ] = None,
    layout: Annotated[
        bool,
        typer.Option("--layout", help="Keep the layout (parallel, engines, machine), too."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a recipe from a configuration of verl, slime, Miles, TRL, prime-rl, ROLL or OpenRLHF.
    Runs nothing of it."""
    from milescli.checkpoint.store import write_atomically
    from milescli.recipe.imports.write import import_files

    output: Output = context.obj
    # of os.path, which takes what is no possible path for one that does not exist
    is_word = {one: "=" in one and not os.path.exists(os.path.expanduser(one)) for one in files}
    paths = [Path(one).expanduser() for one in files if not is_word[one]]
    if not paths:
        raise typer.BadParameter("name at least one file")
    if to is not None and to.exists() and not force:
        raise RecipeError(
            f"{to} exists already",
            why="it may have been edited since it was imported",
            fix=[
                shlex.join(["--to", str(to.with_name(f"{to.stem}-2.yaml"))]),
                "--force   # replaces it",
            ],
        )
    if to is not None and not to.absolute().parent.is_dir():
        raise MachineError(
            f"the folder {to.parent} does not exist",
            why="a recipe is written into an existing folder",
            fix=shlex.join(["mkdir", "-p", str(to.parent)]),
        )
    words = [one for one in files if is_word[one]]
    made = import_files(paths, framework=source, overrides=words, keep_layout=layout)
    output.note(f"{made.framework}: {made.reason}")
    for note in made.notes:
        output.warn(note)
    output.json(
        "import",
        {
            "framework": made.framework,
            "recipe": made.text,
            "values": {key: one.value for key, one in made.entries.items()},
            "layout": {key: one.value for key, one in made.layout.items()},
            "without": [[one.where, one.name, one.value, why] for one, why in made.without],
            "notes": made.notes,
        },
    )
    if to is None:
        output.text(made.text)
        return
    write_atomically(to.absolute(), made.text)
    counted = f"{len(made.entries)} keys, {len(made.without)} without a counterpart"
    output.success(f"{to}: {counted}, listed at its end")
    output.note(
        f"miles launch --recipe {shlex.quote(str(to))} --dry-run --on 8xH100   # shows the plan"
    )
