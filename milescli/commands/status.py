"""`miles status`: one screen of a run: how far, how good, how fast, and what is wrong."""

from __future__ import annotations

from typing import Annotated

import typer

from milescli.commands import suggest
from milescli.commands.find_run import newest_run
from milescli.commands.options import verb
from milescli.console.output import Output

EXAMPLES = ["miles status", "miles status quickstart-1 --watch", "miles status --json"]

WatchOption = Annotated[
    bool, typer.Option("--watch", "-w", help="Go on until the run ends, or Ctrl-C.")
]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "status", examples=EXAMPLES)(status)


def status(
    context: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run: its name or its directory; the newest where none is named.",
            autocompletion=suggest.runs,
            show_default=False,
        ),
    ] = None,
    *,
    watch: WatchOption = False,
) -> None:
    """Say how a run is doing: is it learning, where is the time, what is wrong.

    Reads the run's directory, also while it runs, over ssh and as another user; writes nothing.
    """
    output: Output = context.obj
    folder = newest_run(run)
    from milescli.checkpoint.run_dir import open_run
    from milescli.commands.show.status import show_status, watch_status

    opened = open_run(folder)
    if watch:
        watch_status(opened, output)
    else:
        show_status(opened, output)
