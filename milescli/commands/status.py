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
    bool, typer.Option("--watch", "-w", help="Keep updating until the run ends, or Ctrl-C.")
]


@verb("status", examples=EXAMPLES)
def status(
    context: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run (name or directory); the newest by default.",
            autocompletion=suggest.runs,
            show_default=False,
        ),
    ] = None,
    *,
    watch: WatchOption = False,
) -> None:
    """Report how a run is doing: whether it learns, where the time goes, and what is wrong. Reads
    only the run's directory, so it works during the run, over ssh and as another user."""
    output: Output = context.obj
    folder = newest_run(run)
    from milescli.checkpoint.run_dir import open_run
    from milescli.commands.show.status import show_status, watch_status

    opened = open_run(folder)
    if watch:
        watch_status(opened, output)
    else:
        show_status(opened, output)
