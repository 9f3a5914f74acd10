"""`miles runs`: what was trained, and how far each run came."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

import typer

from milescli.commands.find_run import run_names, runs_folder
from milescli.commands.options import verb
from milescli.console.columns import percent
from milescli.console.output import Output

if TYPE_CHECKING:
    from milescli.insight.run_state import RunState

LONGEST_NOTE = 60
"""Number of characters of a note that the table shows."""
EXAMPLES = ["miles runs", "miles runs --json", "MILES_RUN__DIR=/data/runs miles runs"]


@verb("runs", examples=EXAMPLES, is_page=True)
def runs(context: typer.Context) -> None:
    """List the runs, newest first."""
    from milescli.checkpoint.run_dir import RunDir
    from milescli.insight.run_state import RunStates

    output: Output = context.obj
    folder = runs_folder()
    states = RunStates()
    shown = [states.of(RunDir(folder / name)) for name in run_names(folder)]
    rows = [{**asdict(one), "changed": _local_time(one.changed_s)} for one in shown]
    output.json("runs", {"dir": str(folder), "runs": rows})
    if not shown:
        output.note(
            f"there are no runs in {folder} yet; start one: miles launch --recipe quickstart"
        )
        return
    columns = ["run", "state", "step", "reward", "accuracy", "changed"]
    further = {
        "forked from": [one.forked_from for one in shown],
        "note": [_first_line(one.note) for one in shown],
    }
    used = {name: cells for name, cells in further.items() if any(cells)}
    output.table(
        [*columns, *used],
        [[*_row(one), *cells] for one, *cells in zip(shown, *used.values(), strict=True)],
    )


def _row(run: RunState) -> list[object]:
    step = f"{run.step}/{run.num_steps}" if run.num_steps else str(run.step)
    reward = None if run.reward is None else f"{run.reward:.3f}"
    accuracy = None if run.accuracy is None else percent(run.accuracy)
    changed = (_local_time(run.changed_s) or "").replace("T", " ")[:16]
    return [run.name, run.state, step, reward, accuracy, changed]


def _first_line(note: str) -> str:
    line = note.partition("\n")[0]
    return line if len(line) <= LONGEST_NOTE else f"{line[: LONGEST_NOTE - 1]}…"


def _local_time(seconds: float | None) -> str | None:
    """Format a time as ISO 8601."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds).isoformat(timespec="seconds")
