"""What a conversion is: a direction makes a plan, and `convert` carries it out. Contract and data;
`to_megatron` and `to_hf` are the directions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from milescli.checkpoint.pipeline import PlannedFile
from milescli.checkpoint.store import CheckpointStore
from milescli.console.output import Output
from milescli.console.transfer import Transfer

if TYPE_CHECKING:
    from milescli.models import WeightTable


def verifying(output: Output) -> Callable[[int, int], Transfer]:
    """For a store: every byte of a checkpoint is read before it counts as whole."""

    def watch(step: int, size_bytes: int) -> Transfer:
        label = f"verifying checkpoint step {step}"
        return Transfer(output, label=label, total=size_bytes, tells_quick=False)

    return watch


def store_of(checkpoints: Path, *, output: Output | None) -> CheckpointStore:
    """To look for a checkpoint in; silent without an output."""
    if output is None:
        return CheckpointStore(checkpoints)
    return CheckpointStore(checkpoints, watch=verifying(output))


def writing(
    output: Output | None, *, size_bytes: int
) -> AbstractContextManager[Callable[[int], None]]:
    """Of a checkpoint that is written out as a folder; silent without an output."""
    if output is None:
        return nullcontext(lambda num_bytes: None)
    label = "writing its weights out"
    return Transfer(output, label=label, total=size_bytes, tells_quick=False)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""As the command line calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionPlan:
    """Everything that one conversion writes and says, decided from headers alone."""

    source: str
    """What is read, for people."""
    origin: dict[str, str]
    """What is read, for the manifest."""
    table: WeightTable
    files: Sequence[PlannedFile]
    """The large ones, in the order in which they are written."""
    write_rest: Callable[[Path], None]
    """Writes everything else into the folder that has them."""
    num_source_tensors: int
    """Each used exactly once."""
    num_target_tensors: int
    """Each written exactly once; of a checkpoint: its keys, each covered exactly once."""
    dtypes: dict[str, int]
    """Of what is written: dtype, as safetensors calls it -> number of tensors."""
    notes: list[str]
    """What the user should know of it."""
    fingerprint: str
    """Of everything that decides which bytes are written: see `fingerprint`."""
    resume_options: tuple[str, ...] = ()
    """What the user's command lacks to mean the same later: `--step 20` where the newest was
    meant."""
    pairs: Callable[[], list[tuple[str, str, str]]]
    """(name on one side, name on the other, shape of one) of every tensor."""
    logits_of: Callable[[Path], tuple[Path, Path]]
    """Of the folder that was written: (Hugging Face folder, `torch_dist` checkpoint) that must
    compute the same."""

    @property
    def size_bytes(self) -> int:
        """Of all planned files."""
        return sum(file.size_bytes for file in self.files)


class Direction(Protocol):
    """From where to what, with its own options."""

    name: str
    """As the command line calls it: hf-to-megatron or megatron-to-hf."""
    source: str
    """As the user gave it."""

    def plan(self, *, output: Output) -> AbstractContextManager[ConversionPlan]:
        """Find or fetch the source and decide what is written. The source stays open within the
        block. Raises CheckpointError where it is not what its config.json says."""

    def outline(self, *, output: Output) -> AbstractContextManager[ConversionPlan]:
        """As `plan`, but fetches no weights: for what only looks."""


def fingerprint(folder: Path, options: Mapping[str, object]) -> str:
    """Of everything that decides what is written: names, sizes and times of the files of a folder
    (config.json among them), options, and the form in which this program writes."""
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
    """20x48"""
    return "x".join(str(length) for length in shape) or "scalar"


def count_text(number: int, what: str) -> str:
    """3 tensors"""
    return f"{number:,} {what}{'s' if number != 1 else ''}"
