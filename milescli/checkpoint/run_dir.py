"""The run directory: every path in it, who may use it, and what its records say. Whoever asks for
a file of a run asks here. Knows nothing of engines or trainers."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from milescli.core.errors import CheckpointError, MachineError, RecipeError
from milescli.core.scalars import STEP_EVENTS

RECIPE_FILE = "recipe.yaml"
"""Its presence makes a directory a run."""
CHECKPOINTS = "checkpoints"
"""Folder of its `step_N`."""
ADAPTERS = "adapters"
"""Folder of a run of several adapters; each in it is a run of its own."""
LONGEST_NAME = 200
"""Bytes of a run's name: file systems allow 255, and files beside it are named after it."""

LAYOUT = {
    "recipe.yaml": "the whole recipe, each value with its origin; `miles launch --recipe FILE` "
    "takes it",
    "plan.json": "what ran where, and why",
    "manifest.json": "versions, data hash, seeds",
    "events.jsonl": "everything that happened, one JSON object a line",
    "metrics.jsonl": "the scalars of every step",
    "tensorboard/": "the same, for `tensorboard --logdir`",
    "run.svg": "a picture of the last frame, to show around",
    "logs/attempt_N/": "one log for each process; `logs/latest` is the newest attempt",
    "checkpoints/step_N/": "Megatron's torch_dist format; complete where it has a manifest.json",
    "rollouts/": "some samples of each step, to read token by token",
    "profiles/N/": "what `miles profile` saw: traces, and summary.json",
    "journal/": "finished samples, which `miles resume` takes instead of sampling them again",
    "eval/": "the samples of each evaluation; of `miles eval` also as parquet, and its figures",
    "adapters/NAME/": "of a run of several adapters: each as a run of its own, for `miles export`, "
    "`miles eval` and `miles resume`",
    "reference/, teacher/": "what a reference or a teacher says of the rows, computed once",
    "model/, data/": "the model and the prompts that miles made itself, where the recipe asks for "
    "them",
}
"""What `miles help run-directory` shows; `RunDir` has a property for each."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths and records of one run. `create` makes a new one, `open_run` opens one."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def full_name(self) -> str:
        """The same; of an adapter's, with that of the run that trains it."""
        above = self.path.parent
        return f"{above.parent.name}-{self.name}" if above.name == ADAPTERS else self.name

    @property
    def shown(self) -> str:
        """The path as a user would type it here."""
        return os.path.relpath(self.path) if Path.cwd() in self.path.parents else str(self.path)

    @property
    def is_run(self) -> bool:
        """Whether the directory holds a run."""
        return self.recipe_file.is_file()

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
        return self.path / "plan.json"

    @property
    def manifest_file(self) -> Path:
        """Versions, data hash, seeds."""
        return self.path / "manifest.json"

    @property
    def events_file(self) -> Path:
        """Every event, one JSON object a line."""
        return self.path / "events.jsonl"

    @property
    def metrics_file(self) -> Path:
        """The scalars of each step, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def picture_file(self) -> Path:
        """The last frame of a run that ended well."""
        return self.path / "run.svg"

    @property
    def checkpoints(self) -> Path:
        """step_<n> folders."""
        return self.path / CHECKPOINTS

    @property
    def score_model_dir(self) -> Path:
        """The model with a score head, of a run that trains scores."""
        return self.path / "score-model"

    @property
    def critic_model_dir(self) -> Path:
        """The model that the run's critic is made of."""
        return self.path / "critic-model"

    @property
    def adapters_dir(self) -> Path:
        """A run directory for each of several adapters."""
        return self.path / ADAPTERS

    def teacher_model_dir(self, number: int) -> Path:
        """A teacher's model, where another run's checkpoint was written out to be one."""
        return self.path / f"teacher-{number}-model"

    def held_model_dir(self, what: str, source: str) -> Path:
        """A model that is asked and not trained (`what`: reward-model, draft-model, role-model),
        where it is the checkpoint of another run: `source`, as the recipe names it."""
        mark = hashlib.blake2b(source.encode(), digest_size=4).hexdigest()
        return self.path / f"{what}-{mark}"

    @property
    def own_model_dir(self) -> Path:
        """The model that miles made for this run: from a seed, or from a converted checkpoint."""
        return self.path / "model"

    @property
    def data_dir(self) -> Path:
        """Prompts that miles made itself."""
        return self.path / "data"

    @property
    def eval_dir(self) -> Path:
        """One file of samples per evaluation."""
        return self.path / "eval"

    @property
    def rollouts_dir(self) -> Path:
        """A few samples of each step, to read."""
        return self.path / "rollouts"

    @property
    def profiles_dir(self) -> Path:
        """What `miles profile` asked for, and saw."""
        return self.path / "profiles"

    @property
    def journal_dir(self) -> Path:
        """Finished samples, for a run that is resumed."""
        return self.path / "journal"

    def attempts(self) -> list[Path]:
        """Log folders of all attempts, oldest first."""
        folders = (self.path / "logs").glob("attempt_*")
        numbers = {one: one.name.partition("_")[2] for one in folders}
        own = [one for one, number in numbers.items() if number.isdecimal()]
        return sorted(own, key=lambda folder: int(numbers[folder]))

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

    def tracking_id(self) -> str:
        """By which trackers know it among all runs, in all its attempts; made at the first."""
        file = self.path / ".tracking-id"
        if not file.exists():
            file.write_text(f"{self.full_name}-{secrets.token_hex(4)}\n", encoding="utf-8")
        return file.read_text(encoding="utf-8").strip()

    def eval_log_dir(self) -> Path:
        """A log folder for `miles eval`, made where it is missing."""
        folder = self.path / "logs" / "eval"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def verdict(self) -> dict[str, object] | None:
        """How the last attempt ended, or None while it goes on (or was never begun)."""
        attempts = self.attempts()
        return next(read_jsonl(verdict_file(attempts[-1])), None) if attempts else None

    def events(self) -> Iterator[dict[str, object]]:
        """Every event so far, in order."""
        return read_jsonl(self.events_file)

    def model_dir(self) -> Path:
        """The Hugging Face folder that this run's trainer and engines read, as its manifest says.

        Raises CheckpointError where the run has no readable manifest.
        """
        try:
            recorded = json.loads(self.manifest_file.read_text(encoding="utf-8"))["model_dir"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"which model run `{self.name}` trains is not known",
                why=f"{self.manifest_file}: {type(error).__name__}: {error}",
                fix=f"miles resume {self.shown}   # writes the manifest anew",
            ) from error
        return (self.path / recorded).resolve()

    def discard_if_unused(self) -> None:
        """Remove the directory where nothing of worth was made: no checkpoint, no evaluation."""
        if not self.checkpoints.exists() and not self.eval_dir.exists():
            shutil.rmtree(self.path)


def step_done(events: Iterable[Mapping[str, object]]) -> int:
    """Steps that they tell of; 0: none."""
    done = (event["step"] for event in events if event.get("event") in STEP_EVENTS)
    return max((int(str(step)) for step in done), default=0)


def step_saved(events: Iterable[Mapping[str, object]]) -> int | None:
    """Of the newest checkpoint that they tell of. Of several adapters: of the one that is furthest
    behind, of those that have not done all their steps."""
    saved, wanted = dict[object, int](), dict[object, int]()
    for event in events:
        who = event.get("adapter")
        if event.get("event") == "CheckpointSaved":
            saved[who] = max(saved.get(who, 0), int(str(event["step"])))
        elif event.get("event") in STEP_EVENTS:
            wanted[who] = int(str(event["num_steps"]))
    behind = [step for who, step in saved.items() if step < wanted.get(who, step + 1)]
    return min(behind) if behind else max(saved.values(), default=None)


def resume_command(shown: str, *, step: int | None, num_steps: int | None = None) -> str:
    """How to go on with a run, for an error. `shown`: as its user calls it; `step`: of its newest
    checkpoint, where it has one; `num_steps`: that it is to do, where that is known."""
    if step is not None and step == num_steps:
        return f"miles export {shown} --to DIR   # all its {step} steps are done and saved"
    where = "begins again: it had saved nothing" if step is None else f"goes on from step {step}"
    return f"miles resume {shown}   # {where}"


def verdict_file(log_dir: Path) -> Path:
    """Of one attempt: written once, when it ended; by the watchdog where the driver was killed."""
    return log_dir / "verdict.json"


def read_jsonl(file: Path) -> Iterator[dict[str, object]]:
    """JSON objects of a file, one a line; a line that is torn or still being written is left out.
    Nothing where there is no file."""
    if not file.exists():
        return
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            yield record


def create(*, base: Path, recipe_name: str, name: str | None) -> RunDir:
    """A new run directory, which its owner alone can read; one that is there and empty keeps its
    rights. Without a name: `<recipe>-<n>` with the first free n. Refuses a directory that is in
    use. Raises MachineError where none can be made."""
    base = base.absolute()
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_made(base, error) from error
    if name is None:
        number = 1
        while (base / f"{recipe_name}-{number}").exists():
            number += 1
        name = f"{recipe_name}-{number}"
    if "/" in name or name.startswith(".") or len(name.encode()) > LONGEST_NAME:
        raise RecipeError(
            f"`{name[:40]}{'...' * (len(name) > 40)}` cannot be the name of a run",
            why=f"it must be one plain folder name of at most {LONGEST_NAME} bytes",
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
    try:
        path.mkdir(mode=0o700, exist_ok=True)  # samples and data may be private
    except OSError as error:
        raise _not_made(path, error) from error
    return RunDir(path)


def _not_made(path: Path, error: OSError) -> MachineError:
    return MachineError(
        f"the run directory {path} cannot be made",
        why=f"{type(error).__name__}: {error}",
        fix=[f"ls -ld {path.parent}   # whose is it?", "--set run.dir=FOLDER   # another place"],
    )


def open_run(path: Path) -> RunDir:
    """An existing run. Raises CheckpointError where the folder is not one."""
    run = RunDir(path.absolute())
    if not run.is_run:
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
