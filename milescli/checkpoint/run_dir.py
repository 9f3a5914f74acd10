"""Defines the run directory: every path in it, its permissions, and the reading of its records. All
code that needs a file of a run uses it. Knows nothing of engines or trainers."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shlex
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from milescli.core.errors import CheckpointError, MachineError, MilesError, RecipeError
from milescli.core.files import (
    open_regular,
    parse_json,
    read_json,
    read_regular_bytes,
    read_regular_text,
)
from milescli.core.scalars import STEP_EVENTS

RECIPE_FILE = "recipe.yaml"
"""Its presence makes a directory a run."""
CHECKPOINTS = "checkpoints"
"""Folder of the `step_N` folders."""
ADAPTERS = "adapters"
"""Folder of a run with several adapters; each folder in it is a run of its own."""
FORKED_FROM = "forked_from"
"""Key in manifest.json of a fork: the run and the step from which it began, and its changes."""
LONGEST_NAME = 200
"""Bytes of a run's name: file systems allow 255, and names of files next to it are longer."""

LAYOUT = {
    "recipe.yaml": "the whole recipe, each value with its origin; `miles launch --recipe FILE` "
    "takes it",
    "plan.json": "what ran where, and why",
    "manifest.json": "versions, data hash, seeds",
    "events.jsonl": "everything that happened, one JSON object a line",
    "metrics.jsonl": "the scalars of every step",
    "tensorboard/": "the same, for `tensorboard --logdir`",
    "wandb/": "what Weights & Biases keeps there, where `run.trackers` names it",
    "note.txt": "what you wrote about it with `miles note`",
    "run.svg": "a picture of the last frame, to show around",
    "logs/attempt_N/": "one log for each process; `logs/latest` is the newest attempt",
    "checkpoints/step_N/": "Megatron's torch_dist format; complete where it has a manifest.json",
    "rollouts/": "some samples of each step, to read token by token",
    "images/": "the pictures that kept samples show, each once, named by its SHA-256",
    "profiles/N/": "what `miles profile` saw: traces, and summary.json",
    "journal/": "finished samples, which `miles resume` takes instead of sampling them again",
    "eval/": "the samples of each evaluation; of `miles eval` also as parquet, and its figures",
    "adapters/NAME/": "of a run of several adapters: each as a run of its own, for `miles export`, "
    "`miles eval` and `miles resume`",
    "engine_start/": "the model in the number format of `rollout.precision`, which engines start "
    "from",
    "reference/, teacher/": "what a reference or a teacher says of the rows, computed once",
    "model/, data/": "the model and the prompts that miles made itself, where the recipe asks for "
    "them",
}
"""Content of `miles help run-directory`; `RunDir` has each path."""


class _PathOf:
    """Gives the path of a file or folder of a run, by its name in the run's directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, kind: type[RunDir]) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunDir:
    """Gives the paths and records of one run. `create` makes a new one, `open_run` opens an
    existing one."""

    path: Path
    recipe_file = _PathOf(RECIPE_FILE)
    """File of the resolved recipe with its origins."""
    lock_file = _PathOf(".lock")
    """File that the run's driver holds locked; see `run_lock`."""
    plan_file = _PathOf("plan.json")
    """File of the last attempt's plan."""
    manifest_file = _PathOf("manifest.json")
    """File with versions, data hash and seeds."""
    events_file = _PathOf("events.jsonl")
    """File of all events, one JSON object per line."""
    metrics_file = _PathOf("metrics.jsonl")
    """File of each step's scalars, one JSON object per line."""
    note_file = _PathOf("note.txt")
    """File of the user's note about the run."""
    picture_file = _PathOf("run.svg")
    """File of the last frame of a run that ended successfully."""
    checkpoints = _PathOf(CHECKPOINTS)
    """Folder of the step_<n> folders."""
    score_model_dir = _PathOf("score-model")
    """Folder of the model with a score head, for a run that trains scores."""
    critic_model_dir = _PathOf("critic-model")
    """Folder of the model from which the run's critic starts."""
    adapters_dir = _PathOf(ADAPTERS)
    """Folder with a run directory for each of several adapters."""
    own_model_dir = _PathOf("model")
    """Folder of the model that miles made for this run, from a seed or from a converted
    checkpoint."""
    data_dir = _PathOf("data")
    """Folder of prompts that miles generated."""
    eval_dir = _PathOf("eval")
    """Folder with one file of samples per evaluation."""
    rollouts_dir = _PathOf("rollouts")
    """Folder with a few readable samples of each step."""
    images_dir = _PathOf("images")
    """Folder of the pictures of stored samples."""
    profiles_dir = _PathOf("profiles")
    """Folder of the requests and results of `miles profile`."""
    journal_dir = _PathOf("journal")
    """Folder of finished samples, from which a run is resumed."""

    @property
    def name(self) -> str:
        """Return the run's name."""
        return self.path.name

    @property
    def full_name(self) -> str:
        """Return the run's name; for an adapter's run, with the name of the run that trains it."""
        above = self.path.parent
        return f"{above.parent.name}-{self.name}" if above.name == ADAPTERS else self.name

    @property
    def shown(self) -> str:
        """Return the path as a user would type it in the current directory."""
        return os.path.relpath(self.path) if Path.cwd() in self.path.parents else str(self.path)

    @property
    def typed(self) -> str:
        """Return `shown` as a word of a command, quoted if a shell would split or change it."""
        return shlex.quote(self.shown)

    @property
    def is_run(self) -> bool:
        """Return True if the directory holds a run."""
        return self.recipe_file.is_file()

    @property
    def recipe_sha256(self) -> str:
        """Return the SHA-256, hex, of the resolved recipe."""
        return hashlib.sha256(read_regular_bytes(self.recipe_file)).hexdigest()

    def teacher_model_dir(self, number: int) -> Path:
        """Return the folder of a teacher that is exported from another run's checkpoint. `number`:
        its place among the teachers."""
        return self.path / f"teacher-{number}-model"

    def queried_model_dir(self, what: str, source: str) -> Path:
        """Return the folder of a model that is queried and not trained (`what`: reward-model,
        draft-model, role-model), exported from another run's checkpoint. `source`: that checkpoint,
        as the recipe names it."""
        mark = hashlib.blake2b(source.encode(), digest_size=4).hexdigest()
        return self.path / f"{what}-{mark}"

    @property
    def journal_files(self) -> list[Path]:
        """Return the files of the journal, those of collecting processes included."""
        return sorted(file for file in self.journal_dir.rglob("*") if file.is_file())

    def image_file(self, sha256: str) -> Path:
        """Return the file of the picture with this hash."""
        return self.images_dir / f"{sha256}.png"

    def attempts(self) -> list[Path]:
        """Return the log folders of all attempts, oldest first."""
        folders = (self.path / "logs").glob("attempt_*")
        numbers = {one: one.name.partition("_")[2] for one in folders}
        own = [one for one, number in numbers.items() if number.isdecimal()]
        return sorted(own, key=lambda folder: int(numbers[folder]))

    @property
    def next_attempt(self) -> int:
        """Return the number of the attempt after the last; log folders of earlier ones may have
        been deleted."""
        attempts = self.attempts()
        return int(attempts[-1].name.partition("_")[2]) + 1 if attempts else 1

    def new_attempt(self) -> Path:
        """Create a log folder for this attempt and point `logs/latest` to it."""
        folder = self.path / "logs" / f"attempt_{self.next_attempt}"
        folder.mkdir(parents=True)
        latest = self.path / "logs" / "latest"
        fresh = latest.with_name(f".latest-{os.getpid()}")
        fresh.symlink_to(folder.name)
        fresh.replace(latest)
        return folder

    def tracking_id(self) -> str:
        """Return the id under which trackers record all attempts of the run; created by the
        first."""
        file = self.path / ".tracking-id"
        if not file.exists():
            file.write_text(f"{self.full_name}-{secrets.token_hex(4)}\n", encoding="utf-8")
        return read_regular_text(file).strip()

    def eval_log_dir(self) -> Path:
        """Return a log folder for `miles eval`, created if missing."""
        folder = self.path / "logs" / "eval"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def verdict(self) -> dict[str, object] | None:
        """Return how the last attempt ended; None if it is running, or if there was none."""
        attempts = self.attempts()
        return next(read_jsonl(verdict_file(attempts[-1])), None) if attempts else None

    def events(self) -> Iterator[dict[str, object]]:
        """Yield every event so far, in order."""
        return read_jsonl(self.events_file)

    def model_dir(self) -> Path:
        """Return the Hugging Face folder that this run's trainer and engines read, according to its
        manifest.

        Raises CheckpointError if the run has no readable manifest.
        """
        try:
            recorded = read_json(self.manifest_file)["model_dir"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the model of run `{self.name}` is unknown",
                why=f"{self.manifest_file}: {type(error).__name__}: {error}",
                fix=f"miles resume {self.typed}   # writes the manifest again",
            ) from error
        return (self.path / recorded).resolve()

    def discard_if_unused(self) -> None:
        """Remove the directory if it contains no checkpoint and no evaluation."""
        if not self.checkpoints.exists() and not self.eval_dir.exists():
            shutil.rmtree(self.path)


def step_done(events: Iterable[Mapping[str, object]]) -> int:
    """Return the last step that the events report as done; 0 if there is none."""
    done = (_number(event, "step") for event in events if event.get("event") in STEP_EVENTS)
    return max(done, default=0)


def _number(event: Mapping[str, object], name: str) -> int:
    """Return a whole number of an event; 0 if it is missing or damaged."""
    value = event.get(name)
    return value if isinstance(value, int) else 0


def step_saved(events: Iterable[Mapping[str, object]]) -> int | None:
    """Return the step of the newest checkpoint that the events report, or None. With several
    adapters, return that of the adapter that is furthest behind, among those with steps left."""
    saved, wanted = dict[object, int](), dict[object, int]()
    for event in events:
        who = event.get("adapter")
        if event.get("event") == "CheckpointSaved":
            saved[who] = max(saved.get(who, 0), _number(event, "step"))
        elif event.get("event") in STEP_EVENTS:
            wanted[who] = _number(event, "num_steps")
    outdated = [step for who, step in saved.items() if step < wanted.get(who, step + 1)]
    return min(outdated) if outdated else max(saved.values(), default=None)


def resume_command(shown: str, *, step: int | None, num_steps: int | None = None) -> str:
    """Return the command that resumes a run, for an error. `shown`: path as its user types it;
    `step`: that of its newest checkpoint, if any; `num_steps`: number of steps, if known."""
    shown = shlex.quote(shown)
    if step is not None and step == num_steps:
        return f"miles export {shown} --to DIR   # all its {step} steps are done and saved"
    where = (
        "goes on where it was saved, before step 1" if step == 0 else f"goes on from step {step}"
    )
    if step is None:
        where = "starts from the beginning: it had saved nothing"
    return f"miles resume {shown}   # {where}"


def verdict_file(log_dir: Path) -> Path:
    """Return the file of one attempt's verdict. It is written once at its end, or by the watchdog
    if the driver was killed."""
    return log_dir / "verdict.json"


def read_jsonl(file: Path, *, after: int = 0) -> Iterator[dict[str, object]]:
    """Yield the JSON objects of a file from byte `after` on, one per line. Skips a line that is
    torn or still being written. Yields nothing without a file."""
    if not file.exists():
        return
    with open_regular(file) as lines:
        lines.seek(after)
        for line in lines:
            try:
                record = parse_json(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield record


def create(*, base: Path, recipe_name: str, name: str | None) -> RunDir:
    """Create a run directory that only its owner can read; an existing empty one keeps its
    permissions. Without a name it is `<recipe>-<n>` with the first free n. Raises MachineError if
    none can be created, and refuses a directory that is in use."""
    base = base.absolute()
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _create_error(base, error) from error
    if name is None:
        number = 1
        while (base / f"{recipe_name}-{number}").exists():
            number += 1
        name = f"{recipe_name}-{number}"
    refuse_existing(base, name)
    path = base / name
    try:
        path.mkdir(mode=0o700, exist_ok=True)  # samples and data may be private
    except OSError as error:
        raise _create_error(path, error) from error
    return RunDir(path)


def is_locked(run: RunDir) -> bool:
    """Return True if a driver works on the run now."""
    try:
        with open(run.lock_file) as file:
            return not take_flock(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False
    except MachineError:  # a run that was copied to a file system without locks can be looked at
        host, _, driver = _content(run.lock_file).strip().partition(" ")
        if not driver.isdecimal():
            return False
        return host != socket.gethostname() or Path("/proc", driver).is_dir()
    except OSError:
        return True


def take_flock(file: IO[str], kind: int) -> bool:
    """Take a lock on an open file without waiting; return False if another process holds it.
    `kind`: fcntl.LOCK_SH or LOCK_EX. Raises MachineError on a file system without locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise MachineError(
            f"the file system of {Path(file.name).parent} has no locks",
            why=f"{error.strerror}; a run holds a lock so that only one process works on it",
            fix="--set run.dir=FOLDER   # on a file system with locks; on Lustre: mount -o flock",
        ) from error
    return True


def running_error(run: RunDir) -> MilesError:
    """Return the error of a command that cannot be used while a driver works on the run."""
    host, _, driver = _content(run.lock_file).strip().partition(" ")
    here = driver.isdecimal() and host == socket.gethostname()
    stop = [f"miles stop {run.typed}   # it saves and stops, as by Ctrl-C"] if here else []
    where = f", process {driver} on {host}" if driver else ""
    return MilesError(
        f"run `{run.name}` is running",
        why=f"a miles process is working on {run.shown}{where}",
        fix=[
            f"miles status {run.typed} --watch   # follow its progress",
            *(stop or ["press Ctrl-C in its terminal to save and stop it"]),
        ],
    )


def _content(file: Path) -> str:
    try:
        return read_regular_text(file)
    except OSError:
        return ""


def refuse_bad_name(name: str) -> None:
    """Raise RecipeError if `name` cannot be the name of a folder."""
    if "/" in name or name.startswith(".") or len(name.encode()) > LONGEST_NAME:
        raise RecipeError(
            f"`{name[:40]}{'...' * (len(name) > 40)}` is not a valid name for a run",
            why=f"it must be a single folder name of at most {LONGEST_NAME} bytes",
            fix="--name my-run",
        )


def refuse_existing(base: Path, name: str) -> None:
    """Raise RecipeError if `name` cannot be the name of a folder, or if a run of this name is in
    `base`."""
    refuse_bad_name(name)
    run = RunDir(base / name)
    if not run.path.exists() or not any(run.path.iterdir()):
        return
    if is_locked(run):
        running = running_error(run)
        other = f"--name {name}-{secrets.token_hex(2)}   # a new one beside it"
        raise RecipeError(running.what, why=running.why, fix=[*running.fixes, other])
    outcome = (run.verdict() or {}).get("outcome")
    go_on = {
        "done": f"miles resume {run.typed} --steps N   # train it further",
        "stopped": f"miles resume {run.typed}   # continue the stopped run",
    }
    raise RecipeError(
        f"run directory {run.path} is in use",
        why="a new run never overwrites an old one",
        fix=[
            *([go_on.get(str(outcome), f"miles resume {run.typed}   # go on")] * run.is_run),
            f"--name {name}-{secrets.token_hex(2)}   # a new name",
            f"mv {run.typed} {run.typed}.old",
        ],
    )


def _create_error(path: Path, error: OSError) -> MachineError:
    return MachineError(
        f"the run directory {path} cannot be created",
        why=f"{type(error).__name__}: {error}",
        fix=[
            f"ls -ld {path.parent}   # who owns it?",
            "--set run.dir=FOLDER   # use another folder",
        ],
    )


def open_run(path: Path) -> RunDir:
    """Open an existing run. Raises CheckpointError if the folder is not one."""
    run = RunDir(path.absolute())
    if not run.is_run:
        raise CheckpointError(
            f"{path} is not a run directory",
            why=f"it has no {RECIPE_FILE}" if path.exists() else "there is no such folder",
            fix="miles runs   # lists them",
        )
    return run


def write_json(file: Path, payload: object) -> None:
    """Write JSON atomically, so that no reader sees an incomplete file."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_text(json.dumps(payload, indent=2, sort_keys=True) + "\n")
    fresh.replace(file)


def utc_now() -> str:
    """Return the current time as 2026-11-21T07:50:00Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
