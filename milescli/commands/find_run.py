"""Resolves RUN, as a user types it, to the run's directory: a path, or a name below the runs
directory."""

from __future__ import annotations

import errno
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.checkpoint.base import is_converted
from milescli.checkpoint.run_dir import RECIPE_FILE, RunDir
from milescli.core.errors import CheckpointError, MachineError, nearest, unreadable_folder

if TYPE_CHECKING:
    from milescli.console.output import Output


def state_folder() -> Path:
    """Return the user's folder for files that miles keeps between commands: crash reports, the
    page's key."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "miles"


def runs_folder() -> Path:
    """Return the folder of runs: MILES_RUN__DIR, the user files, or ./runs."""
    from milescli.recipe.load import runs_dir

    return runs_dir(environ=os.environ, cwd=Path.cwd(), home=Path.home())


def run_names(folder: Path) -> list[str]:
    """Return the names of the runs in a folder, newest first."""
    files = sorted(
        folder.glob(f"*/{RECIPE_FILE}"), key=lambda file: file.stat().st_mtime, reverse=True
    )
    return [file.parent.name for file in files]


def find_run(run: str, *, folder: Path | None = None) -> Path:
    """Return the directory of a run. Raises CheckpointError with the nearest names if there is
    none, MachineError if it is not readable."""
    folder = folder or runs_folder()
    for candidate in (Path(run).expanduser(), folder / run):
        if run and (_is_run(candidate) or _is_restored(candidate)):
            return candidate
    if run and (sweep := find_sweep(run)) is not None:
        raise CheckpointError(
            f"`{run}` is a sweep, not a run",
            why="its trials are runs, and are named after it",
            fix=[f"miles report {shlex.quote(run)}   # lists its trials", f"use `{sweep.name}-1`"],
        )
    names = run_names(folder)
    guess = nearest(Path(run).name, names)
    is_folder = Path(run).is_dir() or (folder / run).is_dir()
    known = (
        f"runs in {folder}: {', '.join(names[:8])}" + (" …" if len(names) > 8 else "")
        if names
        else f"there is no run in {folder}"
    )
    raise CheckpointError(
        f"`{run}` is not a run" if is_folder else f"there is no run `{run}`",
        why=f"it has no {RECIPE_FILE}; {known}" if is_folder else known,
        fix=([f"use `{guess}`"] if guess else [])
        + (["miles runs"] if names else ["miles launch --recipe quickstart"]),
    )


def fetch_run(url: str, *, output: Output) -> Path:
    """Download a run from an object store into the runs folder, and return its directory. Raises as
    `restore`."""
    from milescli.runtime.recovery.restoring import restore

    return restore(url, runs=runs_folder(), output=output)


def _is_run(folder: Path) -> bool:
    try:
        is_run = (folder / RECIPE_FILE).is_file()
        for file in (folder / RECIPE_FILE, RunDir(folder).events_file):
            if is_run and file.exists() and not os.access(file, os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
    except PermissionError as error:
        raise unreadable_folder(folder, error) from error
    return is_run


def _is_restored(folder: Path) -> bool:
    """Return True if the folder lacked its recipe.yaml, and a checkpoint's copy of it was
    restored."""
    if not (folder / "checkpoints").is_dir():
        return False
    from milescli.checkpoint.store import restore_recipe

    try:
        return restore_recipe(folder)
    except OSError as error:
        raise MachineError(
            f"{folder / RECIPE_FILE} is lost, and cannot be written again",
            why=f"a checkpoint of the run has it, but: {error.strerror or error}",
            fix=f"ls -ld {folder}   # who owns it, and is the disk full?",
        ) from error


def find_sweep(name: str) -> Path | None:
    """Return the directory of a sweep; None if the name is not that of a sweep."""
    from milescli.sweep.folder import is_sweep

    folder = runs_folder()
    return next((one for one in (Path(name).expanduser(), folder / name) if is_sweep(one)), None)


def newest_run(run: str | None) -> Path:
    """Return the directory of a run, or of the newest run if no name is given. Raises
    CheckpointError if there is none."""
    if run is not None:
        return find_run(run)
    folder = runs_folder()
    names = run_names(folder)
    if not names:
        raise CheckpointError(
            "there are no runs yet",
            why=f"{folder} contains no runs",
            fix=["miles launch --recipe quickstart", "pass its directory: miles status DIR"],
        )
    return find_run(names[0], folder=folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTarget:
    """Holds what `miles eval` evaluates: a run, a model or an endpoint; the others are None."""

    run: Path | None = None
    step: int | None = None
    """Step of the run, if one of its checkpoints was named."""
    model: str | None = None
    """A folder, or a name on the hub."""
    endpoint: str | None = None
    """A URL."""


def find_eval_target(text: str) -> EvalTarget:
    """Return the run, checkpoint (RUN@STEP or its folder), model or endpoint that the text means.
    Raises CheckpointError as `find_run`."""
    if re.match(r"https?://", text):
        return EvalTarget(endpoint=text)
    name, at, number = text.rpartition("@")
    if at and number.isdecimal() and not Path(text).expanduser().exists():
        return EvalTarget(run=find_run(name), step=int(number))
    folder = Path(text).expanduser()
    run = folder.absolute().parent.parent
    step = re.fullmatch(r"step_(\d+)", folder.name)
    if step and folder.is_dir() and (run / RECIPE_FILE).is_file():
        return EvalTarget(run=run, step=int(step[1]))
    if not (folder / RECIPE_FILE).is_file():
        is_hub = not folder.exists() and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text)
        if is_hub or (folder / "config.json").is_file() or is_converted(folder):
            return EvalTarget(model=text)
    return EvalTarget(run=find_run(text))


def find_weights(source: str) -> Path:
    """Return the folder of a run, or of anything else with weights: a checkpoint, a model, an
    adapter. Raises CheckpointError as `find_run`."""
    folder = Path(source).expanduser()
    marks = ("config.json", "adapter_config.json", ".metadata", "latest_checkpointed_iteration.txt")
    if not (folder / RECIPE_FILE).is_file() and any((folder / mark).is_file() for mark in marks):
        return folder
    return find_run(source)
