"""Stores a request for a profile, and its progress, as files in the run's directory: `miles
profile` writes a request, and the driver takes it between two steps. All files are private to the
owner."""

from __future__ import annotations

import json
import os
import shlex
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from milescli.checkpoint.run_dir import RunDir, write_json
from milescli.core.errors import MachineError, MilesError
from milescli.core.files import parse_json, read_json, read_regular_text

REQUEST, STATE, SUMMARY, CANCELLED = "request.json", "state.json", "summary.json", "cancelled"
MAX_STEPS = 10
"""Largest number of steps of one profile: a trace of a step may have a million events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Describes the profile that a user requests."""

    number: int
    """Number of the profile: its folder's name."""
    steps: int
    ranks: list[int] = field(default_factory=list)
    """Trainer ranks that are traced."""
    engines: list[int] = field(default_factory=list)
    """Engines that are sampled, by their index in the plan."""
    memory: bool = False
    """True to also report what is in the memory of the ranks."""


class Progress(StrEnum):
    """Names the progress of a profile."""

    BEGUN = "begun"
    """The profile is being taken."""
    DONE = "done"
    ENDED = "ended"
    """The run ended or failed in the middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Holds the driver's report of a profile."""

    progress: Progress
    first_step: int
    """First step that is profiled."""
    last_step: int
    """Last step that is profiled, once it is done."""
    seconds: float = 0.0
    """Seconds from the beginning of the first step to the end of the last."""
    ranks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Results by number of the rank: `file`, or `error`; `seconds`; `memory`."""
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Results by number of the engine: `file`, or `error`."""


def request_file(run: RunDir) -> Path:
    """Return the file of a pending request."""
    return run.profiles_dir / REQUEST


def folder_of(run: RunDir, number: int) -> Path:
    """Return the folder of one profile."""
    return run.profiles_dir / str(number)


def write_request(run: RunDir, wanted: Request) -> Path:
    """Write the request, create the folder of the profile and return it. Raises MilesError if
    another request is pending, MachineError if the disk cannot be written."""
    folder = folder_of(run, wanted.number)
    try:
        if is_pending(run):
            raise FileExistsError
        folder.mkdir(mode=0o700, parents=True)
        written = folder / REQUEST
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(wanted)) + "\n")
        _place(written, request_file(run))
    except FileExistsError:
        raise MilesError(
            "another profile of this run is about to start",
            why=f"{request_file(run)} exists; the run reads it after its current step",
            fix=[
                "wait, then repeat the command",
                f"rm {shlex.quote(str(request_file(run)))}   # withdraws that request",
            ],
        ) from None
    except OSError as error:
        raise MachineError(
            f"a profile cannot be requested in {run.shown}",
            why=f"{type(error).__name__}: {error}",
            fix=f"ls -ld {shlex.quote(str(run.profiles_dir))}   # who owns it?",
        ) from error
    return folder


def _place(written: Path, target: Path) -> None:
    """Write a file atomically. Raises FileExistsError if it exists."""
    try:
        os.link(written, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if os.path.lexists(target):
            raise FileExistsError(target) from None
        written.replace(target)


def next_number(run: RunDir) -> int:
    """Return the number of the next profile; creates the parent folder of all profiles."""
    with suppress(OSError):
        run.profiles_dir.mkdir(mode=0o700, exist_ok=True)
    numbers = [int(entry.name) for entry in run.profiles_dir.glob("[0-9]*") if entry.is_dir()]
    return max(numbers, default=0) + 1


def cancel_request(run: RunDir, number: int) -> None:
    """Cancel a request: it is not started, or is abandoned after the current step."""
    with suppress(OSError):
        (folder_of(run, number) / CANCELLED).touch(mode=0o600)
    with suppress(OSError, ValueError):
        if read_json(request_file(run))["number"] == number:
            request_file(run).unlink()


def is_pending(run: RunDir) -> bool:
    """Return True if a request is pending; costs one access to the disk."""
    return os.path.lexists(run.profiles_dir / REQUEST)


def take_request(run: RunDir) -> Request | None:
    """Remove and return the pending request; return None if there is none, or if it is invalid or
    another user's."""
    file = request_file(run)
    try:
        seen = os.lstat(file)
        own = stat.S_ISREG(seen.st_mode) and seen.st_uid == os.geteuid()
        text = read_regular_text(file) if own else ""
        file.unlink()
        wanted = Request(**parse_json(text))
        numbers = [wanted.number, wanted.steps, *wanted.ranks, *wanted.engines]
        sound = all(type(number) is int for number in numbers)
        sound = sound and 0 < wanted.steps <= MAX_STEPS and folder_of(run, wanted.number).is_dir()
    except (OSError, ValueError, TypeError):
        return None
    return wanted if sound and not is_cancelled(run, wanted.number) else None


def is_cancelled(run: RunDir, number: int) -> bool:
    """Return True if the request was cancelled."""
    return (folder_of(run, number) / CANCELLED).exists()


def write_state(run: RunDir, number: int, state: State) -> None:
    """Write the state for which `miles profile` waits. Ignores a full disk, which must not stop the
    run."""
    with suppress(OSError):
        write_json(folder_of(run, number) / STATE, asdict(state))


def read_state(run: RunDir, number: int) -> State | None:
    """Read the state; return None if the profile has not started."""
    try:
        raw = read_json(folder_of(run, number) / STATE)
    except (OSError, ValueError):
        return None
    return State(**{**raw, "progress": Progress(raw["progress"])})
