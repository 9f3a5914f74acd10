"""Finds the runs that a server shows, by the ids in its URLs. New runs in a runs folder appear
automatically."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from milescli.checkpoint.run_dir import RECIPE_FILE, RunDir
from milescli.core.errors import MachineError, nearest
from milescli.web.responses import NotFound

LOOK_EVERY_S = 1.0
"""Seconds for which a listing of the folder is reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """Describes a run, or one of a run's several adapters."""

    id: str
    """Id in URLs: the run's name, made unique; for an adapter `run:adapter`."""
    run: RunDir
    parent: RunDir | None = None
    """For an adapter, the run that trains it; else None."""

    @property
    def adapters(self) -> list[str]:
        """Return the ids of the run's adapters."""
        names = sorted(file.parent.name for file in self.run.adapters_dir.glob(f"*/{RECIPE_FILE}"))
        return [] if self.parent else [f"{self.id}:{name}" for name in names]


@dataclass(slots=True, kw_only=True)
class ShownRuns:
    """Holds the runs that one server shows."""

    folder: Path | None = None
    """Show all runs in this folder; None: show those in `named`."""
    named: Sequence[Path] = ()
    _seen: dict[str, ShownRun] = field(default_factory=dict)
    _until: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def all(self) -> list[ShownRun]:
        """Return the runs, newest first; named ones in their order."""
        return list(self._runs().values())

    def find(self, run_id: str) -> ShownRun:
        """Return the run or adapter with this id. Raises NotFound with the nearest id."""
        runs = self._runs()
        if run_id in runs:
            return runs[run_id]
        name, _, adapter = run_id.rpartition(":")
        if name in runs and run_id in runs[name].adapters:
            above = runs[name].run
            return ShownRun(id=run_id, run=RunDir(above.adapters_dir / adapter), parent=above)
        guess = nearest(run_id, runs)
        raise NotFound(
            f"there is no run `{run_id[:100]}`",
            why=f"{len(runs)} runs are shown" + (f", of {self.folder}" if self.folder else ""),
            fix=f"ask for `{guess}`"
            if guess
            else "list the runs first: /api/runs, or the tool `runs`",
        )

    def _runs(self) -> dict[str, ShownRun]:
        with self._lock:
            if time.monotonic() >= self._until:
                self._seen = _by_id(self.named if self.folder is None else _runs_in(self.folder))
                self._until = time.monotonic() + LOOK_EVERY_S
            return self._seen


def _by_id(paths: Sequence[Path]) -> dict[str, ShownRun]:
    runs = dict[str, ShownRun]()
    for path in paths:
        run, number = RunDir(path.absolute()), 1
        run_id = run.full_name
        while run_id in runs:
            number += 1
            run_id = f"{run.full_name}-{number}"
        runs[run_id] = ShownRun(id=run_id, run=run)
    return runs


def _runs_in(folder: Path) -> list[Path]:
    """List runs, newest first, without those that disappear meanwhile or that this user may not
    read."""
    ages = list[tuple[float, Path]]()
    for file in folder.glob(f"*/{RECIPE_FILE}"):
        try:
            ages.append((file.stat().st_mtime, file.parent))
        except OSError:
            continue
    return [path for _, path in sorted(ages, key=lambda one: (-one[0], one[1].name))]


def shown_runs(folder: Path | None, named: Sequence[Path]) -> ShownRuns:
    """Return all runs of a folder, including later ones, or those that are named. Raises
    MachineError if one is not readable."""
    if folder is not None:
        _require_listing(folder, what="runs folder")
    for path in named:
        _require_listing(path, what="run")
    return ShownRuns(folder=folder, named=tuple(named))


def _require_listing(folder: Path, *, what: str) -> None:
    try:
        next(folder.iterdir(), None)
    except FileNotFoundError:
        return
    except OSError as error:
        raise MachineError(
            f"the {what} {folder} cannot be read",
            why=f"{type(error).__name__}: {error}",
            fix=[
                f"ls -ld {shlex.quote(str(folder))}   # check its owner",
                "ask its owner for the right to read it",
            ],
        ) from None
