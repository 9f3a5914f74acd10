"""Reads the samples that a run stored for people to read: rollouts/step_N.jsonl. Diagnoses read the
newest steps; the page reads any."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from milescli.checkpoint.run_dir import RunDir
from milescli.core.files import read_lines, read_regular_bytes

MAX_IMAGE_BYTES = 64 * 2**20
"""Largest picture to show, in bytes: no prompt's picture is larger."""
_PNG = b"\x89PNG\r\n\x1a\n"
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSample:
    """Holds one sample that the run stored for people to read."""

    step: int
    prompt_index: int
    prompt: str
    response: str
    reward: float | None
    stop_reason: str
    record: dict[str, Any]
    """The whole line: also reward_parts, episode, versions, lines, see `runtime.kept_samples`."""


def sample_steps(run: RunDir) -> list[int]:
    """Return the steps with stored samples, ascending."""
    numbers = (file.stem.partition("_")[2] for file in run.rollouts_dir.glob("step_*.jsonl"))
    return sorted(int(number) for number in numbers if number.isdigit())


def read_samples(run: RunDir, step: int) -> list[KeptSample]:
    """Read the samples of one step, in the order of their groups; none if none were stored."""
    return read_file(run.rollouts_dir / f"step_{step}.jsonl", step=step)


def read_last(run: RunDir, *, num_steps: int) -> list[KeptSample]:
    """Read the samples of the newest steps that have any, oldest first."""
    steps = sample_steps(run)[-num_steps:]
    return [sample for step in steps for sample in read_samples(run, step)]


def read_file(file: Path, *, step: int) -> list[KeptSample]:
    """Read the samples of a file. Unreadable lines are left out."""
    try:
        lines = read_lines(file)
    except OSError:
        return []
    return [sample for line in lines if (sample := _sample(line, step)) is not None]


def images_in(record: Mapping[str, Any], key: str = "images") -> list[str]:
    """Return the hashes of the pictures in the prompt of a stored sample, or with `returned_images`
    of those that its tools returned; only valid hashes, whoever wrote the file."""
    named = record.get(key)
    return [one for one in named if is_hash(one)] if isinstance(named, list) else []


def is_hash(name: object) -> bool:
    """Return True for 64 hex digits."""
    return isinstance(name, str) and _SHA256.fullmatch(name) is not None


def read_image(run: RunDir, sha256: str) -> bytes | None:
    """Return the PNG with this hash that a run stored; None if there is none, or if the file's
    content has another hash."""
    if not is_hash(sha256):
        return None
    try:
        file = run.image_file(sha256)
        if not file.is_file() or file.stat().st_size > MAX_IMAGE_BYTES:
            return None
        data = read_regular_bytes(file)
    except OSError:
        return None
    is_own = data.startswith(_PNG) and hashlib.sha256(data).hexdigest() == sha256
    return data if is_own else None


def by_group(samples: Sequence[KeptSample]) -> list[list[KeptSample]]:
    """Return the groups of samples, in their order. A prompt may occur twice in a step: its second
    group begins where a number of the first repeats."""
    groups, numbers = list[list[KeptSample]](), set[object]()
    for sample in samples:
        last = groups[-1][-1] if groups else None
        number = sample.record.get("sample_index")
        is_same = last is not None and (last.step, last.prompt_index) == (
            sample.step,
            sample.prompt_index,
        )
        if not is_same or number in numbers:
            groups.append([])
            numbers.clear()
        groups[-1].append(sample)
        if number is not None:
            numbers.add(number)
    return groups


def _is_whole(record: Mapping[str, Any]) -> bool:
    """Return True if the fields of a line have their types; a damaged line is left out."""
    texts = [record["prompt"], record["response"], record["stop_reason"], record.get("label") or ""]
    versions, ids = record.get("versions", []), record.get("response_ids") or []
    return (
        all(isinstance(text, str) for text in texts)
        and isinstance(record["prompt_index"], int)
        and isinstance(record["reward"], int | float | None)
        and isinstance(versions, list)
        and all(isinstance(version, int | str) for version in versions)
        and isinstance(ids, list)
    )


def _sample(line: bytes, step: int) -> KeptSample | None:
    try:
        record = orjson.loads(line)
        if not _is_whole(record):
            return None
        return KeptSample(
            step=step,
            prompt_index=record["prompt_index"],
            prompt=record["prompt"],
            response=record["response"],
            reward=record["reward"],
            stop_reason=record["stop_reason"],
            record=record,
        )
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
