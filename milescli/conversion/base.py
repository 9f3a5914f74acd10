"""Defines a conversion: a direction makes a plan, and `convert` executes it. `to_megatron` and
`to_hf` are the directions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from milescli.checkpoint.safetensors_file import torch_dtype
from milescli.checkpoint.store import CheckpointStore
from milescli.console.output import Output
from milescli.console.transfer import Transfer

if TYPE_CHECKING:
    import torch

    from milescli.checkpoint.pipeline import PlannedFile
    from milescli.models import WeightTable


def verify_progress(output: Output) -> Callable[[int, int], Transfer]:
    """Return a progress display for a store that reads every byte of a checkpoint to verify it."""

    def watch(step: int, size_bytes: int) -> Transfer:
        label = f"verifying checkpoint step {step}"
        return Transfer(output, label=label, total=size_bytes, tells_quick=False)

    return watch


def store_of(checkpoints: Path, *, output: Output | None) -> CheckpointStore:
    """Return a store for finding a checkpoint; silent without an output."""
    if output is None:
        return CheckpointStore(checkpoints)
    return CheckpointStore(checkpoints, watch=verify_progress(output))


def write_progress(
    output: Output | None, *, size_bytes: int
) -> AbstractContextManager[Callable[[int], None]]:
    """Return a progress display for exporting a checkpoint to a folder; silent without an
    output."""
    if output is None:
        return nullcontext(lambda num_bytes: None)
    label = "writing its weights out"
    return Transfer(output, label=label, total=size_bytes, tells_quick=False)


_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""Names on the command line -> names in safetensors."""


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return the dtype that the command line names, or None without a name."""
    return None if name is None else torch_dtype(_DTYPES[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionPlan:
    """Describes everything that one conversion writes and reports, decided from headers alone."""

    source: str
    """Description of the source, for people."""
    origin: dict[str, str]
    """Description of the source, for the manifest."""
    table: WeightTable
    files: Sequence[PlannedFile]
    """The large files, in the order in which they are written."""
    write_small_files: Callable[[Path], None]
    """Writes everything else into the folder with these files."""
    num_source_tensors: int
    """Each used exactly once."""
    num_target_tensors: int
    """Each written exactly once; for a checkpoint: its keys, each covered exactly once."""
    dtypes: dict[str, int]
    """Number of written tensors by dtype, in safetensors' names."""
    notes: list[str]
    """Notes for the user."""
    fingerprint: str
    """Digest of everything that determines the written bytes, made by `fingerprint`."""
    resume_options: tuple[str, ...] = ()
    """Options that the user's command needs to mean the same later: `--step 20` if the newest was
    meant."""
    pairs: Callable[[], list[tuple[str, str, str]]]
    """(name on one side, name on the other, shape of one) of every tensor."""
    logits_of: Callable[[Path], tuple[Path, Path]]
    """Maps the written folder to the (Hugging Face folder, `torch_dist` checkpoint) that must
    compute the same."""

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all planned files."""
        return sum(file.size_bytes for file in self.files)


class Direction(Protocol):
    """Converts in one direction, with its own options."""

    name: str
    """Name on the command line: hf-to-megatron or megatron-to-hf."""
    source: str
    """Source as the user gave it."""

    def plan(self, *, output: Output) -> AbstractContextManager[ConversionPlan]:
        """Find or fetch the source and decide what is written. The source stays open within the
        block. Raises CheckpointError if it contradicts its config.json."""

    def outline(self, *, output: Output) -> AbstractContextManager[ConversionPlan]:
        """Make a plan as `plan` does without fetching weights, for a preview."""


def fingerprint(folder: Path, options: Mapping[str, object]) -> str:
    """Digest everything that determines what is written: names, sizes and times of the files of a
    folder (config.json among them), the options, and the format version of this program."""
    files = sorted(
        (path.name, (stat := path.stat()).st_size, stat.st_mtime_ns)
        for path in folder.iterdir()
        if path.is_file()
    )
    text = json.dumps(
        {"format": 1, "files": files, "options": dict(options)}, sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()


def shape_text(shape: tuple[int, ...]) -> str:
    """Format a shape: 20x48."""
    return "x".join(str(length) for length in shape) or "scalar"


def count_text(number: int, what: str) -> str:
    """Format a count: 3 tensors."""
    return f"{number:,} {what}{'s' if number != 1 else ''}"
