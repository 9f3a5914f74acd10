"""`runs`: one line for each run, by the end of its events.jsonl, so that a folder of many long runs
is listed at once."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from milescli.checkpoint.run_dir import STEP_EVENTS, RunDir
from milescli.insight.history import History
from milescli.insight.summary import state_of
from milescli.web.asked import Json
from milescli.web.shown import ShownRun

BLOCK_BYTES = 2**20
BACK_BYTES = 16 * 2**20
"""What stands before the last so many of a file is not looked through."""


@dataclass(slots=True)
class _Tail:
    """What the newest records of a file say."""

    inode: int = -1
    size_bytes: int = 0
    """Up to which it was looked through, and with it the last line that is whole."""
    step: int = 0
    num_steps: int | None = None
    reward: float | None = None
    accuracy: float | None = None


@dataclass(slots=True)
class States:
    """Of all runs of a server; remembers how far each file was read."""

    _tails: dict[Path, _Tail] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, shown: ShownRun) -> Json:
        """One line of the list."""
        run = shown.run
        with self._lock:
            tail = self._tails.setdefault(run.path, _Tail())
            try:
                _read_on(tail, run.events_file)
                changed_s = _changed_s(run)
            except OSError:  # gone meanwhile, or not ours: its own page says so
                changed_s = None
        changed = None if changed_s is None else datetime.fromtimestamp(changed_s)
        return {
            "id": shown.id,
            "name": run.full_name,
            "folder": str(run.path),
            "state": _state_of(run),
            "step": tail.step,
            "num_steps": tail.num_steps,
            "reward": tail.reward,
            "accuracy": tail.accuracy,
            "changed": changed and changed.isoformat(timespec="seconds"),
            "changed_s": changed_s,
            "adapters": shown.adapters,
        }


def _state_of(run: RunDir) -> str:
    """By what lies beside its events."""
    try:
        return state_of(run, History())
    except (OSError, ValueError):
        return "not started"


def _changed_s(run: RunDir) -> float:
    file = run.events_file
    return (file if file.exists() else run.path).stat().st_mtime


def _read_on(tail: _Tail, file: Path) -> None:
    with open(file, "rb") as opened:
        seen = file.stat()
        if seen.st_ino != tail.inode or seen.st_size < tail.size_bytes:
            tail.inode, tail.size_bytes = seen.st_ino, 0
            tail.step, tail.num_steps, tail.reward, tail.accuracy = 0, None, None, None
        if seen.st_size == tail.size_bytes:
            return
        step, evaluation, rest, end = None, None, b"", seen.st_size
        begin = max(tail.size_bytes, seen.st_size - BACK_BYTES)
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
            step = step or _last(lines, STEP_EVENTS)
            evaluation = evaluation or _last(lines, ("EvalDone",))
            rest, end = head + found, start
        _take(tail, step, evaluation)
        tail.size_bytes = whole if whole is not None else tail.size_bytes


def _take(tail: _Tail, step: Json | None, evaluation: Json | None) -> None:
    if step is not None:
        tail.step, tail.num_steps = int(step["step"]), int(step["num_steps"])
        tail.reward = step.get("rollout", {}).get("reward_mean")
    if evaluation is not None:
        tail.accuracy = evaluation.get("accuracy")


def _last(lines: bytes, kinds: tuple[str, ...]) -> Json | None:
    """The newest record of these kinds; a line that is torn is none."""
    marks = [f'"{kind}"'.encode() for kind in kinds]
    end = len(lines)
    while (at := max(lines.rfind(mark, 0, end) for mark in marks)) >= 0:
        begin = lines.rfind(b"\n", 0, at) + 1
        stop = lines.find(b"\n", at)
        if stop >= 0 and (record := _object(lines[begin:stop], kinds)) is not None:
            return record
        end = begin
    return None


def _object(line: bytes, kinds: tuple[str, ...]) -> Json | None:
    try:
        record: Any = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            record = json.loads(line)  # knows NaN
        except ValueError:
            return None
    is_one = isinstance(record, dict) and record.get("event") in kinds
    return record if is_one and ("step" in record) else None
