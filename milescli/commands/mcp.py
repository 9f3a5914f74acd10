"""`miles mcp`: tools over runs for an assistant that speaks the Model Context Protocol."""

from __future__ import annotations

from typing import Annotated

import typer

from milescli.commands import suggest
from milescli.commands.find_run import find_run, runs_folder
from milescli.commands.options import verb
from milescli.console.output import Output

EXAMPLES = [
    "claude mcp add miles -- miles mcp",
    "miles mcp quickstart-1    # this run alone",
    "miles mcp --control       # its tools may also start, stop and resume runs",
]


@verb("mcp", examples=EXAMPLES)
def mcp(
    context: typer.Context,
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN...]",
            help="Runs to offer (names or directories); by default every run in the runs folder.",
            autocompletion=suggest.runs,
            show_default=False,
        ),
    ] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Offer tools that start, stop and resume runs.")
    ] = False,
) -> None:
    """Serve tools over your runs (status, why, metrics, samples, logs) to an assistant, on standard
    input and output. The assistant's program starts it; it only reads unless you add --control."""
    from milescli.web.app import Site
    from milescli.web.control import Control
    from milescli.web.mcp_server import require_package, serve
    from milescli.web.shown import shown_runs

    require_package()
    output: Output = context.obj
    folder = runs_folder()
    shown = shown_runs(None if runs else folder, [find_run(run) for run in runs or ()])
    commands = Control() if control else None
    try:
        serve(Site(shown=shown, on_fault=output.warn, control=commands))
    finally:
        if commands is not None:
            commands.close()
