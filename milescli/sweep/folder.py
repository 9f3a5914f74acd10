"""Reads and writes the folder of a sweep: its settings, and a ledger of its trials, from which a
killed sweep continues. The trials are runs beside it. Knows no searcher and no process.

    runs/NAME/  sweep.yaml  base/RECIPE.yaml  place.json  trials.jsonl  logs/
                winner.yaml  report.md
    runs/NAME-1/, runs/NAME-2/, ...  a run each"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from milescli.checkpoint.run_dir import (
    RunDir,
    create,
    read_jsonl,
    refuse_bad_name,
    refuse_existing,
    write_json,
)
from milescli.checkpoint.run_lock import state_of
from milescli.core.errors import CheckpointError, RecipeError
from milescli.core.files import read_json
from milescli.recipe.load import runs_dir
from milescli.recipe.sweep import Sweep, read_sweep
from milescli.recipe.templates import find_recipe

SWEEP_FILE = "sweep.yaml"
LEDGER = "trials.jsonl"
"""Its presence makes a folder a sweep."""


class TrialState(StrEnum):
    """Names the progress of a trial."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    """Saved, and waits for the other trials (pbt)."""
    DONE = "done"
    STOPPED_EARLY = "stopped early"
    """Stopped by the scheduler: saved, and not the best."""
    STOPPED = "stopped"
    """Stopped by a user, or with the sweep: saved, and continues when the sweep does."""
    FAILED = "failed"
    REFUSED = "refused"
    """Not started: its recipe is invalid, or does not fit on the machine."""


ENDED = (TrialState.DONE, TrialState.STOPPED_EARLY, TrialState.FAILED, TrialState.REFUSED)
"""States of a finished trial."""


@dataclass(slots=True, kw_only=True)
class Trial:
    """Describes one trial, as the ledger and its run record it."""

    number: int
    """Number, from 1."""
    settings: Mapping[str, str]
    """Searched key -> value, as `--set` takes it."""
    run_name: str
    """Name of its run; with pbt, that of the fork with which it continues."""
    state: TrialState = TrialState.WAITING
    error: Mapping[str, Any] = field(default_factory=dict)
    """what, why and fix of one that failed or was refused; see `MilesError.as_dict`."""
    earlier_runs: list[str] = field(default_factory=list)
    """With pbt, the runs before, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepDir:
    """Provides the paths and the ledger of one sweep."""

    path: Path
    sweep: Sweep
    recipe: str
    """Path of the copy of the recipe."""
    cwd: Path
    """Folder in which the sweep started: relative paths of the recipe start there."""

    @property
    def name(self) -> str:
        """Return the sweep's name."""
        return self.path.name

    @property
    def shown(self) -> str:
        """Return the path as a user would type it here."""
        return RunDir(self.path).shown

    @property
    def typed(self) -> str:
        """Return `shown` as a word of a command."""
        return RunDir(self.path).typed

    @property
    def launch_winner(self) -> str:
        """Return the command that trains with the settings of the best trial."""
        return f"miles launch {self.typed}/{self.winner_file.name}"

    @property
    def winner_file(self) -> Path:
        """Return the file of the best trial's recipe."""
        return self.path / "winner.yaml"

    @property
    def report_file(self) -> Path:
        """Return the file of the report, Markdown."""
        return self.path / "report.md"

    def log_file(self, trial: Trial) -> Path:
        """Return the file of what a trial's process writes to stderr, JSON lines."""
        return self.path / "logs" / f"{trial.run_name}.log"

    def run_of(self, trial: Trial) -> RunDir:
        """Return the run of a trial; it need not exist yet."""
        return RunDir(self.path.parent / trial.run_name)

    def record(self, trial: Trial) -> None:
        """Write a trial to the ledger, before anything depends on it."""
        # a line that was torn by the death of whoever wrote it spoils none after it
        line = "\n" + json.dumps(asdict(trial), ensure_ascii=False)
        with open(self.path / LEDGER, "a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def trials(self) -> list[Trial]:
        """Return all trials that were started, by number. If the ledger does not say that one has
        ended, its state is read from its run."""
        latest = dict[int, Trial]()
        for line in read_jsonl(self.path / LEDGER):
            try:
                trial = Trial(**{**line, "state": TrialState(str(line["state"]))})  # type: ignore[arg-type]
                refuse_bad_name(trial.run_name)
            except (TypeError, ValueError, KeyError):
                continue  # another version's, or damaged
            latest[trial.number] = trial
        for trial in latest.values():
            trial.state = self._state(trial)
            if trial.state is TrialState.DONE:
                trial.error = {}  # a user resumed its run to the end
        return [latest[number] for number in sorted(latest)]

    def _state(self, trial: Trial) -> TrialState:
        run = self.run_of(trial)
        state = state_of(run) if run.is_run else "not started"
        if trial.state in (*ENDED, TrialState.PAUSED):
            is_mended = state == "done" and trial.state in (
                TrialState.FAILED,
                TrialState.STOPPED_EARLY,
            )
            return TrialState.DONE if is_mended else trial.state
        # a failure that the sweep was not there to see is tried again
        again = {"not started": TrialState.WAITING, "killed": TrialState.STOPPED}
        again["failed"] = TrialState.STOPPED
        return again.get(state) or TrialState(state)


def is_sweep(folder: Path) -> bool:
    """Return True if the folder is a sweep's."""
    return (folder / LEDGER).is_file() and (folder / SWEEP_FILE).is_file()


def create_sweep(sweep: Sweep, *, environ: Mapping[str, str], cwd: Path, home: Path) -> SweepDir:
    """Create the folder of a sweep. Raises RecipeError if it, or a run with the name of a trial,
    already exists; MachineError if it cannot be created."""
    base = runs_dir(environ=environ, cwd=cwd, home=home)
    folder = base / sweep.name
    if is_sweep(folder):
        run = RunDir(folder.absolute())
        raise RecipeError(
            f"the sweep {run.shown} already exists",
            why="a new sweep never overwrites an old one",
            fix=[
                f"miles resume {run.typed}   # continue it",
                f"miles report {run.typed}   # what it has found so far",
                f"mv {run.typed} {run.typed}.old   # or write another `name` into the sweep file",
            ],
        )
    for number in range(1, sweep.num_trials + 1):
        refuse_existing(base.absolute(), f"{sweep.name}-{number}")
    recipe = find_recipe(sweep.settings.recipe, cwd=cwd)
    path = create(base=base, recipe_name=sweep.name, name=sweep.name).path
    (path / "logs").mkdir()
    (path / "base").mkdir()
    copy = path / "base" / recipe.name
    copy.write_bytes(recipe.read_bytes())
    (path / SWEEP_FILE).write_text(sweep.text, encoding="utf-8")
    write_json(path / "place.json", {"recipe": recipe.name, "cwd": str(cwd)})
    (path / LEDGER).touch(mode=0o600)
    return SweepDir(path=path, sweep=sweep, recipe=str(copy), cwd=cwd)


def open_sweep(folder: Path) -> SweepDir:
    """Open an existing sweep. Raises CheckpointError if its files are damaged."""
    path = folder.absolute()
    sweep = read_sweep(path / SWEEP_FILE, source=f"{RunDir(path).shown}/{SWEEP_FILE}")
    try:
        place = read_json(path / "place.json")
        if not Path(place["cwd"]).is_dir():
            raise FileNotFoundError(f"the folder {place['cwd']}, in which it started, is gone")
        return SweepDir(
            path=path,
            sweep=replace(sweep, name=path.name),
            recipe=str(path / "base" / place["recipe"]),
            cwd=Path(place["cwd"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the sweep {folder} cannot be continued",
            why=f"{path / 'place.json'}: {type(error).__name__}: {error}",
            fix="miles runs   # its trials are runs like others",
        ) from error
