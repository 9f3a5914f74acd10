"""Reads the state of a run, its outcome and its progress, from the files beside its events and from
the end of the events, so that many long runs are listed quickly. For `miles runs` and the list of
the page."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from milescli.checkpoint.run_control import read_note
from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.run_lock import state_of
from milescli.core.files import open_regular
from milescli.core.scalars import STEP_EVENTS
from milescli.core.units import parse_time
from milescli.insight.facts import read_facts
from milescli.insight.reader import DAMAGED, object_of

Json = dict[str, Any]
T = TypeVar("T")
UNREADABLE = "unreadable"
BLOCK_BYTES = 2**20
BACK_BYTES = 16 * 2**20
"""Number of bytes at the end of a file that are searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Holds one line of a list of runs."""

    name: str
    state: str
    """State of the run, as `state_of` returns it, or UNREADABLE."""
    step: int
    num_steps: int | None
    reward: float | None
    """Mean reward of the last step."""
    accuracy: float | None
    """Accuracy of the last evaluation."""
    changed_s: float | None
    """When it wrote its newest event, seconds since 1970; None if unknown."""
    created_s: float | None = None
    """When it was launched, seconds since 1970; None if unknown."""
    model: str = ""
    """Folder or name of the initial model; its family, if it was made from a seed."""
    note: str = ""
    """The user's note about it; words that begin with `#` are tags."""
    forked_from: str = ""
    """`RUN @ step N` of the run that a fork began with."""


@dataclass(slots=True)
class _Tail:
    """Holds the contents of the newest records of an events file."""

    inode: int = -1
    size_bytes: int = 0
    """Position up to which the file was searched, the end of its last complete line."""
    step: int = 0
    num_steps: int | None = None
    reward: float | None = None
    accuracy: float | None = None
    manifest_s: float = -1.0
    """Modification time of the manifest that was read."""
    created_s: float | None = None
    model: str = ""
    forked_from: str = ""


@dataclass(slots=True)
class RunStates:
    """Reads the states of many runs; caches how far each file was read. Called from threads."""

    _tails: dict[Path, _Tail] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, run: RunDir) -> RunState:
        """Return the current state of a run, as far as its files exist and can be read."""
        with self._lock:
            tail = self._tails.setdefault(run.path, _Tail())
            with suppress(OSError):
                _read_on(tail, run.events_file)
            with suppress(OSError):
                _read_manifest(tail, run)
            return RunState(
                name=run.full_name,
                state=_state_of(run),
                step=tail.step,
                num_steps=tail.num_steps,
                reward=tail.reward,
                accuracy=tail.accuracy,
                changed_s=_changed_s(run),
                created_s=tail.created_s,
                model=tail.model,
                note=read_note(run),
                forked_from=tail.forked_from,
            )


def _state_of(run: RunDir) -> str:
    try:
        if run.events_file.exists() and not os.access(run.events_file, os.R_OK):
            return UNREADABLE  # another user's: nothing says whether it is running
        return state_of(run)
    except (OSError, ValueError):  # not ours to read, or not made by us: the others are listed
        return "not started"


def _changed_s(run: RunDir) -> float | None:
    for path in (run.events_file, run.path):
        with suppress(OSError):
            return path.stat().st_mtime
    return None


def _read_manifest(tail: _Tail, run: RunDir) -> None:
    written_s = run.manifest_file.stat().st_mtime
    if written_s == tail.manifest_s:
        return
    facts = read_facts(run)
    created_s = parse_time(facts.manifest.get("created"))
    tail.manifest_s, tail.created_s = written_s, None if math.isnan(created_s) else created_s
    tail.forked_from = facts.forked_from
    path = str(facts.key("model.path", ""))
    tail.model = path.rstrip("/").rpartition("/")[2] or str(facts.key("model.scratch.family", ""))


def _read_on(tail: _Tail, file: Path) -> None:
    with open_regular(file) as opened:
        status = os.fstat(opened.fileno())
        if status.st_ino != tail.inode or status.st_size < tail.size_bytes:
            tail.inode, tail.size_bytes = status.st_ino, 0
            tail.step, tail.num_steps, tail.reward, tail.accuracy = 0, None, None, None
        if status.st_size == tail.size_bytes:
            return
        step, evaluation, rest, end = None, None, b"", status.st_size
        begin = max(tail.size_bytes, status.st_size - BACK_BYTES)
        whole = None
        while end > begin and (step is None or evaluation is None):
            start = max(begin, end - BLOCK_BYTES)
            opened.seek(start)
            block = opened.read(end - start) + rest
            if whole is None and b"\n" in block:
                whole = start + block.rindex(b"\n") + 1
            head, found, lines = block.partition(b"\n")
            if start == tail.size_bytes:  # the beginning of a line
                head, lines = b"", block
            step = step or _last(lines, STEP_EVENTS, _progress)
            evaluation = evaluation or _last(lines, ("EvalDone",), _accuracy)
            rest, end = head + found, start
        if step is not None:
            tail.step, tail.num_steps, tail.reward = step
        if evaluation is not None:
            [tail.accuracy] = evaluation
        tail.size_bytes = whole if whole is not None else tail.size_bytes


def _progress(record: Json) -> tuple[int, int, float | None]:
    """Return (step, number of steps, mean reward); rows have no reward."""
    reward = record.get("rollout", {}).get("reward_mean")
    return int(record["step"]), int(record["num_steps"]), None if reward is None else float(reward)


def _accuracy(record: Json) -> tuple[float]:
    return (float(record["accuracy"]),)


def _last(lines: bytes, kinds: tuple[str, ...], read: Callable[[Json], T]) -> T | None:
    """Return what `read` finds in the newest record of these kinds; a torn or damaged line does not
    count."""
    marks = [f'"{kind}"'.encode() for kind in kinds]
    end = len(lines)
    while (at := max(lines.rfind(mark, 0, end) for mark in marks)) >= 0:
        begin = lines.rfind(b"\n", 0, at) + 1
        stop = lines.find(b"\n", at)
        record = object_of(lines[begin:stop]) if stop >= 0 else None
        if record is not None and record.get("event") in kinds:
            with suppress(*DAMAGED):
                return read(record)
        end = begin
    return None
