"""`miles runs`: what was trained, and how far each run came."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import typer

from milescli.commands.find_run import run_names, runs_folder
from milescli.commands.options import verb
from milescli.console.output import Output

EXAMPLES = ["miles runs", "miles runs --json", "MILES_RUN__DIR=/data/runs miles runs"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "runs", examples=EXAMPLES)(runs)


def runs(context: typer.Context) -> None:
    """List the runs, newest first."""
    from milescli.checkpoint.run_dir import RunDir
    from milescli.commands.run_state import read_state

    output: Output = context.obj
    folder = runs_folder(environ=os.environ, cwd=Path.cwd(), home=Path.home())
    states = [read_state(RunDir(folder / name)) for name in run_names(folder)]
    output.json("runs", {"dir": str(folder), "runs": [asdict(state) for state in states]})
    if not states:
        output.note(f"no run in {folder} yet; start one: miles launch --recipe quickstart")
        return
    columns = ["run", "state", "step", "reward", "accuracy", "changed"]
    output.table(columns, [state.row() for state in states])
