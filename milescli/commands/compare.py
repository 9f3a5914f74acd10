"""`miles compare`: two runs side by side; `miles report` writes the same to a file."""

from __future__ import annotations

from typing import Annotated

import typer

from milescli.commands import suggest
from milescli.commands.options import RunArgument, verb
from milescli.commands.report import report

EXAMPLES = ["miles compare before after", "miles compare before after --json"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "compare", examples=EXAMPLES, is_page=True)(compare)


def compare(
    context: typer.Context,
    run: RunArgument,
    other: Annotated[
        str,
        typer.Argument(
            metavar="RUN2",
            help="The run to compare it with.",
            autocompletion=suggest.runs,
            show_default=False,
        ),
    ],
) -> None:
    """Compare two runs: which settings differ, and which run learns better."""
    report(context, run, other)
