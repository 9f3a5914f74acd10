"""What a conversion did or would do, as plain data; and its manifest. Filled by `convert` and
`preview`, shown by the command."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version

from milescli import __version__
from milescli.checkpoint.base import MANIFEST_NAME
from milescli.checkpoint.files import crc32_of_file
from milescli.checkpoint.journal import JOURNAL_NAME, FinishedFile, PartFolder
from milescli.checkpoint.store import write_atomically
from milescli.conversion.base import ConversionPlan

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
    counts = Counter(
        (_NUMBER.sub("*", left), _NUMBER.sub("*", right), shape) for left, right, shape in pairs
    )
    return [(*line, count) for line, count in counts.items()]


def write_manifest(
    part: PartFolder, plan: ConversionPlan, *, direction: str, given_as: str, proof: Proof
) -> None:
    """The last file: its presence means that the folder is complete. `given_as`: the source, as the
    user gave it."""
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
