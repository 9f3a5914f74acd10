"""How `launch` and `resume` start the driver of a run: below a small process that speaks where it
dies, and starts it again if that is wanted."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from milescli.commands import command_line
from milescli.console.output import Output

if TYPE_CHECKING:
    from milescli.recipe.load import LoadedRecipe

SupervisedOption = Annotated[
    bool,
    typer.Option(
        "--supervised",
        help="Go on from the newest checkpoint where the driver or the machine fails.",
    ),
]


def drive(work: Callable[[], None], *, output: Output, supervised: bool) -> None:
    """Do `work`, and go on with its run where it lost a node, with `supervised` where anything of
    the machine failed, as often as it may. Exits with the driver's code; raises MilesError where it
    died without a word."""
    if not command_line.is_program():
        work()
        return
    from milescli.runtime.recovery.driver_process import MENDABLE, OTHER_NODES, Parent

    parent = Parent(
        output=output,
        again=shlex.join(command_line.typed()),
        resume=partial(go_on_with, output=output),
        mends=MENDABLE if supervised else OTHER_NODES,
    )
    if code := parent.drive(work):
        raise typer.Exit(code)


def begin(loaded: LoadedRecipe, *, output: Output) -> None:
    """Launch a run, and show what it reached."""
    from milescli.commands.show_summary import show_run_summary
    from milescli.runtime.launch import launch

    show_run_summary(launch(loaded, output=output), output=output)


def go_on_with(
    path: Path,
    *,
    output: Output,
    steps: int | None = None,
    sets: list[str] | None = None,
    address: str | None = None,
) -> None:
    """Resume a run, and show what it reached."""
    from milescli.commands.show_summary import show_run_summary
    from milescli.runtime.resume import resume

    done = resume(
        path, steps=steps, sets=sets or [], address=address, environ=os.environ, output=output
    )
    show_run_summary(done, output=output)
