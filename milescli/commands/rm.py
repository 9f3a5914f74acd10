"""`miles rm`: delete runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from milescli.commands import suggest
from milescli.commands.find_run import find_run
from milescli.commands.options import verb
from milescli.console.output import Output
from milescli.core.errors import RecipeError
from milescli.core.units import format_bytes

if TYPE_CHECKING:
    from milescli.checkpoint.run_dir import RunDir

EXAMPLES = ["miles rm quickstart-1", "miles rm first second --yes"]
RunsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...",
        help="Runs to delete: names or directories.",
        autocompletion=suggest.runs,
        show_default=False,
    ),
]


@verb("rm", examples=EXAMPLES)
def remove(
    context: typer.Context,
    runs: RunsArgument,
    *,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Delete without asking for confirmation.")
    ] = False,
) -> None:
    """Delete runs with all their checkpoints, samples and logs."""
    folders = [find_run(run) for run in runs]
    from milescli.checkpoint.run_control import delete, require_deletable, size_bytes
    from milescli.checkpoint.run_dir import open_run

    output: Output = context.obj
    opened = [open_run(folder) for folder in dict.fromkeys(map(Path.absolute, folders))]
    for one in opened:
        require_deletable(one)
    sizes = [size_bytes(one) for one in opened]
    for one, size in zip(opened, sizes, strict=True):
        output.note(f"{one.shown}: {format_bytes(size)}, {_checkpoints(one)}")
    if not yes:
        if not sys.stdin.isatty():
            end_of_options = ["--"] if any(run.startswith("-") for run in runs) else []
            raise RecipeError(
                "nothing was deleted",
                why="there is no terminal to ask for confirmation",
                fix=shlex.join(["miles", "rm", "--yes", *end_of_options, *runs]),
            )
        typer.confirm(f"Delete {'it' if len(opened) == 1 else 'them'}?", abort=True, err=True)
    for one in opened:
        delete(one)
    deleted = [str(one.path) for one in opened]
    output.json("rm", {"runs": deleted, "size_bytes": sum(sizes)})
    output.success(f"deleted {', '.join(one.name for one in opened)}: {format_bytes(sum(sizes))}")


def _checkpoints(run: RunDir) -> str:
    folder = run.path / "checkpoints"
    steps = sorted(folder.glob("step_*")) if folder.is_dir() else []
    return f"{len(steps)} checkpoint{'s' * (len(steps) != 1)}"
