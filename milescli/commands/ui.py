"""`miles ui`: one live page of runs, in a browser."""

from __future__ import annotations

import threading
from typing import Annotated

import typer

from milescli.commands import suggest
from milescli.commands.find_run import find_run, runs_folder, state_folder
from milescli.commands.options import HostOption, verb
from milescli.console.output import Output

EXAMPLES = [
    "miles ui",
    "miles ui quickstart-1",
    "miles ui --port 8080 --open",
    "miles ui --control    # the page may start, stop and resume runs, and chat",
]


@verb("ui", examples=EXAMPLES)
def ui(
    context: typer.Context,
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN...]",
            help="Runs to show (names or directories); by default every run in the runs folder, "
            "including new ones.",
            autocompletion=suggest.runs,
            show_default=False,
        ),
    ] = None,
    host: HostOption = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="Port, by default 8420; 0: any free port."),
    ] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Let the page start, stop and resume runs, and chat.")
    ] = False,
    opens: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in this computer's browser.")
    ] = False,
) -> None:
    """Serve a live web page of your runs: curves, time, samples and logs. It only reads unless you
    add --control. Ctrl-C stops it."""
    from milescli.web.serve import DEFAULT_PORT, open_page, open_page_socket, serve
    from milescli.web.shown import shown_runs

    output: Output = context.obj
    what = "read the runs and start commands as you" if control else "read prompts and logs"
    folder = runs_folder()
    shown = shown_runs(None if runs else folder, [find_run(run) for run in runs or ()])
    page_socket = open_page_socket(host=host, port=port, state=state_folder(), can_control=control)
    if not page_socket.is_loopback:
        output.warn(
            f"other computers can reach {host}: anyone with the URL can {what}, and the traffic is "
            "not encrypted. Safer: omit --host and forward a port: "
            f"ssh -L 8000:127.0.0.1:{page_socket.gate.port} THIS-COMPUTER"
        )

    def ready() -> None:
        output.json("ui", {"url": page_socket.url, "host": host, "port": page_socket.gate.port})
        output.text(page_socket.url)
        output.note(f"anyone with this URL can {what}; Ctrl-C stops the page")
        if port is None and page_socket.gate.port != DEFAULT_PORT:
            output.note(f"another process uses port {DEFAULT_PORT}, so the page uses a free one")
        if opens:  # not here: what it opens is served behind us, and it may wait for that
            options = {"url": page_socket.url, "failed": output.warn}
            threading.Thread(target=open_page, kwargs=options, daemon=True).start()

    serve(page_socket, shown, on_fault=output.warn, ready=ready)
    output.note("the page has ended")
