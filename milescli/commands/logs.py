"""`miles logs`: what the processes of a run have written."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from milescli.commands import suggest
from milescli.commands.find_run import newest_run
from milescli.commands.options import verb
from milescli.console.output import Output
from milescli.core.errors import CheckpointError
from milescli.core.units import format_bytes

EXAMPLES = [
    "miles logs quickstart-1",
    "miles logs quickstart-1 trainer-rank-0 -n 100",
    "miles logs quickstart-1 engine-0-server --follow",
]


@verb("logs", examples=EXAMPLES)
def logs(
    context: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run (name or directory); the newest by default.",
            autocompletion=suggest.runs,
            show_default=False,
        ),
    ] = None,
    log: Annotated[
        str | None,
        typer.Argument(metavar="LOG", help="Log to show; default: list them.", show_default=False),
    ] = None,
    *,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines to show.")] = 40,
    attempt: Annotated[
        int | None,
        typer.Option("--attempt", min=1, help="Attempt to read; default: newest."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines until the run ends.")
    ] = False,
) -> None:
    """List the logs of a run's processes, or show the end of one log."""
    folder = newest_run(run)
    from milescli.checkpoint.run_control import follow_lines, last_lines, logs_of
    from milescli.checkpoint.run_dir import open_run

    output: Output = context.obj
    opened = open_run(folder)
    files = logs_of(opened, attempt=attempt)
    if log is None:
        rows = [(file.stem, file.stat().st_size, _changed(file)) for file in files]
        listed = [{"log": name, "size_bytes": size} for name, size, _ in rows]
        output.json("logs", {"folder": str(files[0].parent), "logs": listed})
        shown = [(name, format_bytes(size), changed) for name, size, changed in rows]
        output.table(["log", "size", "changed"], shown)
        output.note(f"show one: miles logs {opened.typed} {rows[0][0]}")
        return
    file = next((one for one in files if log in (one.stem, one.name)), None)
    if file is None:
        raise CheckpointError(
            f"run `{opened.name}` has no log `{log}`",
            why=f"{files[0].parent} contains {', '.join(one.stem for one in files)}",
            fix=f"miles logs {opened.typed}",
        )
    tail, end = last_lines(file, lines)
    output.json("log", {"path": str(file), "text": tail})
    output.text(tail)
    for text in follow_lines(file, end, opened) if follow else ():
        output.json("log", {"path": str(file), "text": text})
        output.text(text)


def _changed(file: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(file.stat().st_mtime))
