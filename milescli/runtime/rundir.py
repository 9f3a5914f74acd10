"""The run directory: where a run lives, what it is made of, and who may use it. Knows nothing of
engines."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from milescli.core.errors import CheckpointError, MilesError, RecipeError

RECIPE_FILE, PLAN_FILE, MANIFEST_FILE = "recipe.yaml", "plan.json", "manifest.json"


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run. `create` makes a new one, `open_run` finds one."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def shown(self) -> str:
        """The path as a user would type it here."""
        return os.path.relpath(self.path) if Path.cwd() in self.path.parents else str(self.path)

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe, with origins."""
        return self.path / RECIPE_FILE

    @property
    def recipe_sha256(self) -> str:
        """Of the resolved recipe, hex."""
        return hashlib.sha256(self.recipe_file.read_bytes()).hexdigest()

    @property
    def plan_file(self) -> Path:
        """The plan of the last attempt."""
        return self.path / PLAN_FILE

    @property
    def manifest_file(self) -> Path:
        """Versions, data hash, seeds."""
        return self.path / MANIFEST_FILE

    @property
    def checkpoints(self) -> Path:
        """step_<n> folders."""
        return self.path / "checkpoints"

    @property
    def model_dir(self) -> Path:
        """The model made from a seed, where the recipe asks for one; also the tokenizer that
        engines and export use."""
        return self.path / "model"

    @property
    def data_dir(self) -> Path:
        """Prompts that miles made itself."""
        return self.path / "data"

    @property
    def eval_dir(self) -> Path:
        """One file of answers per evaluation."""
        return self.path / "eval"

    @property
    def rollouts_dir(self) -> Path:
        """A few answers of each step, to read."""
        return self.path / "rollouts"

    def attempts(self) -> list[Path]:
        """Log folders of all attempts, oldest first."""
        return sorted(
            (self.path / "logs").glob("attempt_*"),
            key=lambda folder: int(folder.name.partition("_")[2]),
        )

    def new_attempt(self) -> Path:
        """A log folder for this attempt, which `logs/latest` then points to."""
        number = len(self.attempts()) + 1
        folder = self.path / "logs" / f"attempt_{number}"
        folder.mkdir(parents=True)
        latest = self.path / "logs" / "latest"
        fresh = latest.with_name(f".latest-{os.getpid()}")
        fresh.symlink_to(folder.name)
        fresh.replace(latest)
        return folder

    def verdict(self) -> dict[str, object] | None:
        """How the last attempt ended, or None while it goes on (or was never begun)."""
        attempts = self.attempts()
        file = attempts[-1] / "verdict.json" if attempts else None
        return json.loads(file.read_text()) if file and file.exists() else None

    def discard_if_unused(self) -> None:
        """Remove the directory where nothing of worth was made: no checkpoint and no evaluation."""
        if not self.checkpoints.exists() and not self.eval_dir.exists():
            shutil.rmtree(self.path)


@contextmanager
def lock(run: RunDir) -> Iterator[None]:
    """Only one driver works on a run: taken before anything in its directory changes. Given back at
    the end of the process, too.

    Raises MilesError where another process holds it.
    """
    with open(run.path / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise MilesError(
                f"run `{run.name}` is in use",
                why="another miles process works on it",
                fix=["wait until it ends", "press Ctrl-C there: it saves, and can be resumed"],
            ) from None
        yield


def create(*, base: Path, recipe_name: str, name: str | None) -> RunDir:
    """A new run directory. Without a name: `<recipe>-<n>` with the first free n. Refuses a
    directory that is in use."""
    base = base.absolute()
    base.mkdir(parents=True, exist_ok=True)
    if name is None:
        number = 1
        while (base / f"{recipe_name}-{number}").exists():
            number += 1
        name = f"{recipe_name}-{number}"
    if "/" in name or name.startswith("."):
        raise RecipeError(
            f"`{name}` cannot be the name of a run",
            why="it must be one plain folder name",
            fix="--name my-run",
        )
    path = base / name
    if path.exists() and any(path.iterdir()):
        raise RecipeError(
            f"run directory {path} is in use",
            why="a new run never writes over an old one",
            fix=[
                f"miles resume {path}   # go on with it",
                f"--name {name}-{secrets.token_hex(2)}   # a new one",
                f"mv {path} {path}.old",
            ],
        )
    path.mkdir(exist_ok=True)
    return RunDir(path)


def open_run(path: Path) -> RunDir:
    """An existing run. Raises CheckpointError where the folder is not one."""
    run = RunDir(path.absolute())
    if not run.recipe_file.exists():
        raise CheckpointError(
            f"{path} is not a run directory",
            why=f"it has no {RECIPE_FILE}" if path.exists() else "there is no such folder",
            fix="miles runs   # lists them",
        )
    return run


def write_json(file: Path, payload: object) -> None:
    """Atomically, so that no reader sees half of it."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_text(json.dumps(payload, indent=2, sort_keys=True) + "\n")
    fresh.replace(file)


def utc_now() -> str:
    """2026-11-21T07:50:00Z"""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
