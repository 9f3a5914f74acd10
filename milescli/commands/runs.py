"""`miles runs`, `status`, `stop`, `logs`, `note`, `rm`: what was trained, how it is going, and what
can be done with a run that is there."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from milescli.commands import suggest
from milescli.commands.find_run import find_run, find_sweep, newest_run, run_names, runs_folder
from milescli.commands.options import RunArgument, verb
from milescli.console.columns import percent
from milescli.console.output import Output
from milescli.core.errors import CheckpointError, RecipeError
from milescli.core.units import format_bytes

if TYPE_CHECKING:
    from milescli.checkpoint.run_dir import RunDir
    from milescli.insight.run_state import RunState

LONGEST_NOTE = 60
"""Characters of a note that the table shows."""
RUNS_EXAMPLES = ["miles runs", "miles runs --json", "MILES_RUN__DIR=/data/runs miles runs"]


@verb("runs", examples=RUNS_EXAMPLES, is_page=True)
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
    """ISO 8601."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds).isoformat(timespec="seconds")


STATUS_EXAMPLES = ["miles status", "miles status quickstart-1 --watch", "miles status --json"]

WatchOption = Annotated[
    bool, typer.Option("--watch", "-w", help="Keep updating until the run ends, or Ctrl-C.")
]


@verb("status", examples=STATUS_EXAMPLES)
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


STOP_EXAMPLES = ["miles stop quickstart-1", "miles stop quickstart-1 --now"]


@verb("stop", examples=STOP_EXAMPLES)
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
        output.success(f"the sweep {opened.name} {did}; miles resume {opened.shown}   # continues")
        return
    saved = step_saved(opened.events())
    state = state_of(opened)
    payload = {"run": str(folder), "state": state, "was_running": was_running, "step": saved}
    output.json("stop", payload)
    if not was_running:
        output.success(f"{opened.name} was not running: it is {state}")
        return
    output.success(f"{opened.name} is {state}; {resume_command(opened.shown, step=saved)}")


LOGS_EXAMPLES = [
    "miles logs quickstart-1",
    "miles logs quickstart-1 trainer-rank-0 -n 100",
    "miles logs quickstart-1 engine-0-server --follow",
]


@verb("logs", examples=LOGS_EXAMPLES)
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
    from milescli.checkpoint.run_control import added_lines, last_lines, logs_of
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
        output.note(f"show one: miles logs {opened.shown} {rows[0][0]}")
        return
    file = next((one for one in files if log in (one.stem, one.name)), None)
    if file is None:
        raise CheckpointError(
            f"run `{opened.name}` has no log `{log}`",
            why=f"{files[0].parent} contains {', '.join(one.stem for one in files)}",
            fix=f"miles logs {opened.shown}",
        )
    tail, end = last_lines(file, lines)
    output.json("log", {"path": str(file), "text": tail})
    output.text(tail)
    for text in added_lines(file, end, opened) if follow else ():
        output.json("log", {"path": str(file), "text": text})
        output.text(text)


def _changed(file: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(file.stat().st_mtime))


NOTE_EXAMPLES = [
    "miles note quickstart-1 'three times the learning rate #sweep'",
    "miles note quickstart-1       # show it",
    "miles note quickstart-1 ''    # remove it",
]


@verb("note", examples=NOTE_EXAMPLES)
def note(
    context: typer.Context,
    run: RunArgument,
    text: Annotated[
        str | None,
        typer.Argument(metavar="[TEXT]", help="The new note; none: show it.", show_default=False),
    ] = None,
) -> None:
    """Write a note about a run, or show it. Words that begin with # are tags. `miles runs` and the
    page list notes, and the page searches them."""
    folder = find_run(run)
    from milescli.checkpoint.run_control import TAG, read_note, write_note
    from milescli.checkpoint.run_dir import open_run

    output: Output = context.obj
    opened = open_run(folder)
    if text is not None:
        write_note(opened, text)
    kept = read_note(opened)
    output.json("note", {"run": opened.name, "note": kept, "tags": TAG.findall(kept)})
    if kept:
        output.text(kept)
    else:
        output.note(f"run `{opened.name}` has no note")


RM_EXAMPLES = ["miles rm quickstart-1", "miles rm first second --yes"]
RunsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...",
        help="Runs to delete: names or directories.",
        autocompletion=suggest.runs,
        show_default=False,
    ),
]


@verb("rm", examples=RM_EXAMPLES)
def remove(
    context: typer.Context,
    runs: RunsArgument,
    *,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Delete without asking for confirmation.")
    ] = False,
) -> None:
    """Delete runs with all their checkpoints, samples and logs."""
    folders = [find_run(run) for run in runs]
    from milescli.checkpoint.run_control import delete, require_deletable, size_bytes
    from milescli.checkpoint.run_dir import open_run

    output: Output = context.obj
    opened = [open_run(folder) for folder in dict.fromkeys(map(Path.absolute, folders))]
    for one in opened:
        require_deletable(one)
    sizes = [size_bytes(one) for one in opened]
    for one, size in zip(opened, sizes, strict=True):
        output.note(f"{one.shown}: {format_bytes(size)}, {_checkpoints(one)}")
    if not yes:
        if not sys.stdin.isatty():
            raise RecipeError(
                "nothing was deleted",
                why="there is no terminal to ask for confirmation",
                fix=f"miles rm {' '.join(runs)} --yes",
            )
        typer.confirm(f"Delete {'it' if len(opened) == 1 else 'them'}?", abort=True, err=True)
    for one in opened:
        delete(one)
    deleted = [str(one.path) for one in opened]
    output.json("rm", {"runs": deleted, "size_bytes": sum(sizes)})
    output.success(f"deleted {', '.join(one.name for one in opened)}: {format_bytes(sum(sizes))}")


def _checkpoints(run: RunDir) -> str:
    folder = run.path / "checkpoints"
    steps = sorted(folder.glob("step_*")) if folder.is_dir() else []
    return f"{len(steps)} checkpoint{'s' * (len(steps) != 1)}"
