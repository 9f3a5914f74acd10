"""Reports what a conversion did, or would do with --dry-run, as plain data, and writes its
manifest. Filled by `convert` and `preview`, shown by the command."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from milescli import __version__
from milescli.checkpoint import files as disk
from milescli.checkpoint import integrity
from milescli.checkpoint.base import MANIFEST_NAME
from milescli.checkpoint.files import crc32_of_file
from milescli.checkpoint.journal import (
    JOURNAL_NAME,
    FinishedFile,
    PartFolder,
    part_folder_of,
    read_journal,
    require_free,
)
from milescli.checkpoint.store import write_atomically
from milescli.conversion.base import ConversionPlan, Direction
from milescli.core.units import format_bytes

if TYPE_CHECKING:
    from milescli.console.output import Output


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Records what was verified of a conversion."""

    num_source_tensors: int
    """Each used exactly once."""
    num_target_tensors: int
    """Each written exactly once; for a checkpoint: its keys, each covered exactly once."""
    dtypes: dict[str, int]
    """Number of tensors by dtype in the target."""
    checksums: str
    """How the bytes on disk were compared with the computed ones."""
    logits: str
    """What was compared, with the figure; or why nothing was."""
    logits_difference: float | None
    """Relative to the largest logit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Reports a finished conversion."""

    direction: str
    """hf-to-megatron or megatron-to-hf"""
    path: str
    family: str
    num_parameters: int
    size_bytes: int
    seconds: float
    bytes_per_s: float
    """Speed over the files of this attempt."""
    resumed_bytes: int
    """Bytes that an earlier attempt left."""
    proof: Proof
    notes: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """Describes what a conversion would do."""

    source: str
    target: str
    family: str
    num_parameters: int
    size_bytes: int
    num_files: int
    free_bytes: int
    finished_bytes: int
    """Bytes that an earlier attempt left."""
    disk_bytes_per_s: float
    """Disk speed as measured just now."""
    seconds: float
    mapping: list[tuple[str, str, str, int]]
    """(name on one side, name on the other, shape of one, number of tensors)"""
    notes: list[str]


def merge_numbered_lines(pairs: list[tuple[str, str, str]]) -> list[tuple[str, str, str, int]]:
    """Merge lines that differ only in numbers of layers and experts, with their count."""
    counts = Counter(
        (_NUMBER.sub("*", left), _NUMBER.sub("*", right), shape) for left, right, shape in pairs
    )
    return [(*line, count) for line, count in counts.items()]


def write_manifest(
    part: PartFolder, plan: ConversionPlan, *, direction: str, given_as: str, proof: Proof
) -> None:
    """Write the last file, whose presence means that the folder is complete. `given_as` is the
    source as the user gave it."""
    folder, files = part.path, dict(part.finished)
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in files and name != JOURNAL_NAME:
            files[name] = FinishedFile(
                name=name, size_bytes=path.stat().st_size, crc32=crc32_of_file(path)
            )
    manifest = {
        "format": "miles-conversion/1",
        "direction": direction,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "miles_version": __version__,
        "versions": {name: version(name) for name in ("torch", "safetensors", "megatron-core")},
        "family": plan.table.facts.family,
        "num_parameters": plan.table.num_parameters,
        "source": {**plan.origin, "given_as": given_as, "fingerprint": plan.fingerprint},
        "proof": asdict(proof),
        "notes": plan.notes,
        "files": {
            file.name: {"size_bytes": file.size_bytes, "crc32": f"{file.crc32:08x}"}
            for file in files.values()
        },
    }
    write_atomically(folder / MANIFEST_NAME, json.dumps(manifest, indent=2) + "\n")


def preview(direction: Direction, target: Path, *, output: Output) -> Preview:
    """Return what `convert` would do. Raises as `convert` does."""
    target = target.absolute()
    require_free(target)
    with direction.outline(output=output) as plan:
        speed = measure_disk(target.parent)
        finished, notes = _earlier(part_folder_of(target), plan)
        return Preview(
            source=plan.source,
            target=str(target),
            family=plan.table.facts.family,
            num_parameters=plan.table.num_parameters,
            size_bytes=plan.size_bytes,
            num_files=len(plan.files),
            free_bytes=integrity.free_bytes(target.parent),
            finished_bytes=finished,
            disk_bytes_per_s=speed,
            seconds=max(plan.size_bytes - finished, 0) / speed,
            mapping=merge_numbered_lines(plan.pairs()),
            notes=[*plan.notes, *notes],
        )


def _earlier(part: Path, plan: ConversionPlan) -> tuple[int, list[str]]:
    """Return (bytes that an earlier attempt of this conversion has finished, notes about an attempt
    of another one)."""
    journal = read_journal(part)
    if journal.fingerprint == plan.fingerprint:
        return journal.finished_bytes, []
    if not journal.finished:
        return 0, []
    return 0, [
        f"{part} contains {format_bytes(journal.finished_bytes)} made from another source or "
        f"with other options; this command continues it: {journal.resume_command or 'not known'}"
    ]


def measure_disk(folder: Path, *, size_bytes: int = 128 * 2**20) -> float:
    """Measure the bytes per second of writing a file of random bytes in the nearest existing folder
    and reading it back; removes the file."""
    while not folder.exists():
        folder = folder.parent
    path = folder / f".miles-speed-{os.getpid()}"
    block = torch.randint(0, 256, (16 * 2**20,), dtype=torch.uint8)
    size_bytes = min(size_bytes, integrity.free_bytes(folder) // 4)
    began = time.monotonic()
    try:
        with disk.StreamFile(path) as stream:
            for _ in range(max(1, size_bytes // block.numel())):
                stream.write_tensor(block, crc32=disk.crc32_of(block))
        disk.crc32_of_file(path)
        return stream.size / (time.monotonic() - began)
    finally:
        path.unlink(missing_ok=True)
