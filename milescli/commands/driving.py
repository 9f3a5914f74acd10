"""Starts the driver of a run for `launch` and `resume`: as the child of a small process that
reports its death, and restarts it if wanted. Also remembers the command line as typed, for errors
whose fix is a command."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from milescli.console.output import Output
from milescli.core.errors import MilesError, RecipeError

if TYPE_CHECKING:
    from milescli.recipe.load import LoadedRecipe

SupervisedOption = Annotated[
    bool,
    typer.Option(
        "--supervised",
        help="Restart from the newest checkpoint if the driver or the machine fails.",
    ),
]

_COMMAND_LINE: ContextVar[tuple[str, ...]] = ContextVar("typed", default=())
_IS_PROGRAM: ContextVar[bool] = ContextVar("is_program", default=False)


def record_command_line(argv: Sequence[str], *, is_program: bool = False) -> None:
    """Store the words that followed `miles`. `is_program`: True if this process does nothing else,
    so that it may fork and exit."""
    _COMMAND_LINE.set(tuple(argv))
    _IS_PROGRAM.set(is_program)


def typed_command() -> list[str]:
    """Return the words of the command line as typed, starting with `miles`."""
    return ["miles", *_COMMAND_LINE.get()]


_OTHER_RECIPE = re.compile(r"miles launch --recipe (\S+)")
_QUOTED = re.compile(r"`([^`]+)`")


def with_typed_command(error: MilesError) -> MilesError:
    """Return the error of a misspelt recipe with the user's own command line as its fix: `miles
    launch --recipe quickstart` might be another verb, or lack the other options."""
    if not isinstance(error, RecipeError):
        return error
    wrong = set(_QUOTED.findall(error.what)) & {word.rpartition("=")[2] for word in typed_command()}
    for place, fix in enumerate(error.fixes):
        if wrong and (right := _OTHER_RECIPE.fullmatch(fix)):
            words = [
                head + equals + (right[1] if tail in wrong else tail)
                for head, equals, tail in (word.rpartition("=") for word in typed_command())
            ]
            error.fixes[place] = shlex.join(words)
    return error


def drive(work: Callable[[], None], *, output: Output, supervised: bool) -> None:
    """Run `work` in a driver process. Resume its run after the loss of a node and, with
    `supervised`, after any failure of the machine, within the recipe's limit. Exits with the
    driver's code; raises MilesError if the driver died without reporting an error."""
    if not _IS_PROGRAM.get():
        work()
        return
    from milescli.runtime.recovery.driver_process import NODE_ERRORS, RESTARTABLE, Parent

    parent = Parent(
        output=output,
        start_command=shlex.join(typed_command()),
        resume=partial(resume_run, output=output),
        restart_on=RESTARTABLE if supervised else NODE_ERRORS,
    )
    if code := parent.drive(work):
        raise typer.Exit(code)


def begin(loaded: LoadedRecipe, *, output: Output) -> None:
    """Launch a run and show its summary."""
    from milescli.commands.show.summary import show_run_summary
    from milescli.runtime.launch import launch

    show_run_summary(launch(loaded, output=output), output=output)


def resume_run(
    path: Path,
    *,
    output: Output,
    steps: int | None = None,
    sets: list[str] | None = None,
    address: str | None = None,
) -> None:
    """Resume a run and show its summary."""
    from milescli.commands.show.summary import show_run_summary
    from milescli.runtime.resume import resume

    done = resume(
        path, steps=steps, sets=sets or [], address=address, environ=os.environ, output=output
    )
    show_run_summary(done, output=output)
