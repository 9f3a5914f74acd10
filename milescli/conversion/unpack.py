"""Exports a `torch_dist` checkpoint to a Hugging Face folder for engines and trainers, which read
no other format. Part of a run, not of `miles convert`: it computes no logits. Called by the
runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from milescli.checkpoint.journal import PartFolder
from milescli.checkpoint.megatron_to_hf import plan_hf
from milescli.conversion.base import fingerprint, write_progress
from milescli.conversion.convert import write_files
from milescli.export.adapter import read_trained_adapter, write_merged

if TYPE_CHECKING:
    from milescli.console.output import Output


def unpack(
    checkpoint: Path,
    target: Path,
    *,
    model_dir: Path,
    read_back: bool = True,
    output: Output | None = None,
) -> None:
    """Write `target`, which must not exist or be empty; an adapter is merged into its base.
    `model_dir`: has config, tokenizer and tensors that Megatron does not store. `read_back`:
    compare with what is on the disk. `output`: shows the progress. Raises CheckpointError if the
    checkpoint is torn or of another model, or the disk is full. After Ctrl-C, the next call
    resumes."""
    if (adapter := read_trained_adapter(checkpoint, base=model_dir)) is not None:
        write_merged(target, adapter, base=model_dir)
        return
    with plan_hf(checkpoint, model_dir, dtype=None, shard_bytes=None) as plan:
        mark = fingerprint(checkpoint, {"to": "hf", "model": fingerprint(model_dir, {})})
        with PartFolder(target, fingerprint=mark, read_back=read_back) as part:
            with write_progress(output, size_bytes=plan.size_bytes) as progress:
                write_files(part, plan.files, progress=progress)
            plan.write_small_files(part.path, dtype=None)
            part.complete()
