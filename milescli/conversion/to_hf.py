"""Implements `megatron-to-hf`: a `torch_dist` checkpoint of any layout becomes a Hugging Face
folder that transformers and SGLang load. Makes the plan and its notes; `convert` executes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from milescli.checkpoint.megatron_to_hf import HfPlan, plan_hf
from milescli.checkpoint.safetensors_file import dtype_name
from milescli.conversion.base import ConversionPlan, count_text, dtype_of, fingerprint, shape_text
from milescli.conversion.source import find_checkpoint, find_model
from milescli.core.units import format_bytes

if TYPE_CHECKING:
    from milescli.console.output import Output


@dataclass(frozen=True, slots=True, kw_only=True)
class ToHf:
    """Converts a Megatron checkpoint to a Hugging Face folder."""

    name: ClassVar[str] = "megatron-to-hf"
    source: str
    """A checkpoint, a converted model, a run or its step."""
    model: str | None = None
    """Folder or hub name of the model with the checkpoint's config.json; None: SRC determines it.
    """
    step: int | None = None
    """Step of a run, or of a folder of checkpoints; None: the newest."""
    dtype: str | None = None
    """bf16, fp16 or fp32; None: as in the model's folder, else as in the checkpoint."""
    shard_bytes: int | None = None
    """None: file sizes as in the model's folder, else 5 GB."""

    @contextmanager
    def plan(self, *, output: Output) -> Iterator[ConversionPlan]:
        """Make a plan from the checkpoint and the config of its model, which is fetched if it is on
        the hub."""
        model = None
        if self.model is not None:
            model = find_model(self.model, revision=None, output=output)
        checkpoint = find_checkpoint(
            Path(self.source),
            model=model,
            step=self.step,
            model_option="--model",
            output=output,
        )
        output.note(f"{checkpoint.what}, with the config of {checkpoint.model_dir}")
        options = {
            "to": "hf",
            "dtype": self.dtype,
            "shard_bytes": self.shard_bytes,
            "model": fingerprint(checkpoint.model_dir, {}),
        }
        dtype = dtype_of(self.dtype)
        with plan_hf(
            checkpoint.tensors, checkpoint.model_dir, dtype=dtype, shard_bytes=self.shard_bytes
        ) as plan:
            yield ConversionPlan(
                source=str(checkpoint.tensors),
                origin={"path": str(checkpoint.tensors), "model": str(checkpoint.model_dir)},
                table=plan.table,
                files=plan.files,
                write_small_files=lambda folder: plan.write_small_files(folder, dtype=dtype),
                num_source_tensors=plan.num_keys_used,
                num_target_tensors=len(plan.tensors),
                dtypes=dict(Counter(dtype_name(spec.dtype) for spec in plan.tensors)),
                notes=_notes(plan),
                fingerprint=fingerprint(checkpoint.tensors, options),
                resume_options=()
                if checkpoint.newest_step is None
                else ("--step", str(checkpoint.newest_step)),
                pairs=lambda: _pairs(plan),
                logits_of=lambda written: (written, checkpoint.tensors),
            )

    outline = plan


def _pairs(plan: HfPlan) -> list[tuple[str, str, str]]:
    """Return (Megatron's name, name on disk, shape on disk) of every tensor."""
    carried = set(plan.carried)
    origin = {name: entries[0].megatron for name, entries in plan.units.items()}
    return [
        (
            "the model's folder"
            if spec.name in carried
            else origin.get(spec.name, "embedding.word_embeddings.weight"),
            spec.name,
            shape_text(spec.shape),
        )
        for spec in plan.tensors
    ]


def _notes(plan: HfPlan) -> list[str]:
    notes = []
    if plan.carried:
        carried = set(plan.carried)
        size = sum(spec.num_bytes for spec in plan.tensors if spec.name in carried)
        one = len(plan.carried) == 1
        notes.append(
            f"{count_text(len(plan.carried), 'tensor')} that the checkpoint does not hold "
            f"({plan.carried[0]}, ...; {format_bytes(size)})"
            f" {'is' if one else 'are'} taken from the model that it began from, as "
            f"{'it was' if one else 'they were'}"
        )
    if plan.absent_mtp:
        notes.append(
            f"config.json names {plan.table.facts.num_mtp_layers} MTP layers, and neither the "
            "checkpoint nor the model's folder has them: written without"
        )
    if plan.rounded:
        name, (before, after) = next(iter(plan.rounded.items()))
        notes.append(
            f"{len(plan.rounded):,} tensors are rounded from {before} to {after} ({name}, ...), "
            "as the model had them or --dtype says"
        )
    return notes
