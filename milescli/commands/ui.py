"""`miles ui`: one live page of runs, in a browser."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Annotated

import typer

from milescli.commands import suggest
from milescli.commands.find_run import find_run, runs_folder, state_folder
from milescli.commands.options import verb
from milescli.console.output import Output

EXAMPLES = [
    "miles ui",
    "miles ui quickstart-1",
    "miles ui --port 8080 --open",
    "miles ui --control    # the page may start, stop and resume runs, and chat",
]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "ui", examples=EXAMPLES)(ui)


def ui(
    context: typer.Context,
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN...]",
            help="Runs: names or directories; none: all of the runs folder, new ones too.",
            autocompletion=suggest.runs,
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Listen there; others can reach it.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=65535, help="Listen there, by default 8420; 0: a free one."
        ),
    ] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Let the page start, stop and resume runs, and chat.")
    ] = False,
    opens: Annotated[
        bool, typer.Option("--open/--no-open", help="Open it in this computer's browser.")
    ] = False,
) -> None:
    """Serve a live page of runs: is it learning, where is the time, what does it say? It only reads
    unless you add --control. Ctrl-C ends it."""
    from milescli.web.serve import DEFAULT_PORT, open_door, open_page, serve
    from milescli.web.shown import shown_runs

    output: Output = context.obj
    what = "read the runs and start commands as you" if control else "read prompts and logs"
    folder = runs_folder(environ=os.environ, cwd=Path.cwd(), home=Path.home())
    shown = shown_runs(None if runs else folder, [find_run(run) for run in runs or ()])
    door = open_door(host=host, port=port, state=state_folder(), can_control=control)
    if not door.is_loopback:
        output.warn(
            f"{host} can be reached from other computers: whoever has the URL can {what}, and what "
            "is sent is not encrypted. Safer: leave --host out, and "
            f"forward a port: ssh -L 8000:127.0.0.1:{door.gate.port} THIS-COMPUTER"
        )

    def ready() -> None:
        output.json("ui", {"url": door.url, "host": host, "port": door.gate.port})
        output.text(door.url)
        output.note(f"whoever has this URL can {what}; Ctrl-C ends it")
        if port is None and door.gate.port != DEFAULT_PORT:
            output.note(f"port {DEFAULT_PORT} is taken, so this one was free")
        if opens:  # not here: what it opens is served behind us, and it may wait for that
            options = {"url": door.url, "failed": output.warn}
            threading.Thread(target=open_page, kwargs=options, daemon=True).start()

    serve(door, shown, fault=output.warn, ready=ready)
    output.note("the page has ended")
