"""What a conversion did or would do, as plain data; and its manifest. Filled by convert, shown by
the command."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from milescli import __version__
from milescli.checkpoint.base import MANIFEST_NAME
from milescli.checkpoint.files import crc32_of_file
from milescli.checkpoint.journal import JOURNAL_NAME, FinishedFile
from milescli.checkpoint.store import write_atomically

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was shown of a conversion."""

    num_source_tensors: int
    """Each used exactly once."""
    num_target_tensors: int
    """Each written exactly once; of a checkpoint: its keys, each covered exactly once."""
    dtypes: dict[str, int]
    """Of the target, with the number of tensors."""
    checksums: str
    """How what lies on disk was compared with what was computed."""
    logits: str
    """What was compared, with the figure; or why nothing was."""
    logits_difference: float | None
    """Relative to the largest logit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The end of a conversion."""

    direction: str
    """hf-to-megatron or megatron-to-hf"""
    path: str
    family: str
    num_parameters: int
    size_bytes: int
    seconds: float
    bytes_per_s: float
    """Over the files of this attempt."""
    resumed_bytes: int
    """That an earlier attempt had left."""
    proof: Proof
    notes: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What would be done."""

    source: str
    target: str
    family: str
    num_parameters: int
    size_bytes: int
    num_files: int
    free_bytes: int
    finished_bytes: int
    """That an earlier attempt has left."""
    disk_bytes_per_s: float
    """As measured just now."""
    seconds: float
    mapping: list[tuple[str, str, str, int]]
    """(name on one side, name on the other, shape of one, how many)"""
    notes: list[str]


def collapsed(pairs: list[tuple[str, str, str]]) -> list[tuple[str, str, str, int]]:
    """Lines that differ in numbers of layers and experts alone become one, with their count."""
    found: dict[tuple[str, str, str], int] = {}
    for left, right, shape in pairs:
        key = (_NUMBER.sub("*", left), _NUMBER.sub("*", right), shape)
        found[key] = found.get(key, 0) + 1
    return [(*key, count) for key, count in found.items()]


def fingerprint(folder: Path, *, names: list[str], options: dict[str, object]) -> str:
    """Of everything that decides what is written: names, sizes and times of files, config.json,
    options, this program's format."""
    files = [
        (name, (stat := (folder / name).stat()).st_size, stat.st_mtime_ns) for name in sorted(names)
    ]
    text = json.dumps(
        {"format": 1, "files": files, "options": options}, sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()


def write_manifest(
    folder: Path,
    *,
    direction: str,
    source: dict[str, object],
    family: str,
    num_parameters: int,
    proof: Proof,
    files: list[FinishedFile],
    notes: list[str],
) -> None:
    """The last file: its presence means that the folder is complete."""
    versions = {name: version(name) for name in ("torch", "safetensors", "megatron-core")}
    known = {file.name for file in files}
    small = sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.name != JOURNAL_NAME
    )
    files = files + [
        FinishedFile(
            name=name, size_bytes=(folder / name).stat().st_size, crc32=crc32_of_file(folder / name)
        )
        for name in small
        if name not in known
    ]
    manifest = {
        "format": "miles-conversion/1",
        "direction": direction,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "miles_version": __version__,
        "versions": versions,
        "family": family,
        "num_parameters": num_parameters,
        "source": source,
        "proof": asdict(proof),
        "notes": notes,
        "files": {
            file.name: {"size_bytes": file.size_bytes, "crc32": f"{file.crc32:08x}"}
            for file in files
        },
    }
    write_atomically(folder / MANIFEST_NAME, json.dumps(manifest, indent=2) + "\n")
