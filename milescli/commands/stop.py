"""`miles stop`: stop a run from another shell than the one that started it."""

from __future__ import annotations

from typing import Annotated

import typer

from milescli.commands.find_run import find_run, find_sweep
from milescli.commands.options import RunArgument, verb
from milescli.console.output import Output

EXAMPLES = ["miles stop quickstart-1", "miles stop quickstart-1 --now"]


@verb("stop", examples=EXAMPLES)
def stop(
    context: typer.Context,
    run: RunArgument,
    *,
    now: Annotated[bool, typer.Option("--now", help="Stop at once, without saving.")] = False,
    wait_s: Annotated[
        float,
        typer.Option(
            "--wait",
            min=0.0,
            metavar="SECONDS",
            help="Wait up to this many seconds for the run to stop.",
        ),
    ] = 600.0,
) -> None:
    """Stop a running run and save a checkpoint, as Ctrl-C in its terminal does."""
    sweep = find_sweep(run)
    folder = sweep or find_run(run)
    from milescli.checkpoint.run_control import stop as stop_run
    from milescli.checkpoint.run_dir import RunDir, is_locked, resume_command, step_saved
    from milescli.checkpoint.run_lock import state_of

    output: Output = context.obj
    opened = RunDir(folder.absolute())
    if is_locked(opened):
        output.note(
            f"{opened.name} finishes its current work, " + "saves " * (not now) + "and stops"
        )
    was_running = stop_run(opened, timeout_s=wait_s, at_once=now)
    if sweep is not None:
        output.json("stop", {"sweep": str(folder), "was_running": was_running})
        did = "is stopped" if was_running else "was not running"
        output.success(f"the sweep {opened.name} {did}; miles resume {opened.typed}   # continues")
        return
    saved = step_saved(opened.events())
    state = state_of(opened)
    payload = {"run": str(folder), "state": state, "was_running": was_running, "step": saved}
    output.json("stop", payload)
    if not was_running:
        output.success(f"{opened.name} was not running: it is {state}")
        return
    output.success(f"{opened.name} is {state}; {resume_command(opened.shown, step=saved)}")
