"""Implements `hf-to-megatron`: a Hugging Face folder becomes a `torch_dist` checkpoint that stock
Megatron-Core loads under any layout. Makes the plan and its notes; `convert` executes it."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from milescli.checkpoint.base import CARRIED_PART, CHECKPOINT_PART
from milescli.checkpoint.hf_to_megatron import FILE_BYTES, MegatronPlan, plan_megatron
from milescli.checkpoint.safetensors_file import dtype_name
from milescli.checkpoint.source import QuantisedReader, open_source
from milescli.conversion.base import ConversionPlan, count_text, dtype_of, fingerprint, shape_text
from milescli.conversion.source import find_model
from milescli.core.units import format_bytes
from milescli.models import load_facts, table

if TYPE_CHECKING:
    from milescli.console.output import Output


@dataclass(frozen=True, slots=True, kw_only=True)
class ToMegatron:
    """Converts a Hugging Face folder to a Megatron checkpoint."""

    name: ClassVar[str] = "hf-to-megatron"
    source: str
    """A Hugging Face folder, or a name on the hub."""
    revision: str | None = None
    """Revision of a name on the hub."""
    dtype: str | None = None
    """bf16, fp16 or fp32; None: as the source has them."""
    file_bytes: int = FILE_BYTES
    """Largest size of one file of the checkpoint."""

    @contextmanager
    def plan(self, *, output: Output) -> Iterator[ConversionPlan]:
        """Make a plan from the folder, which is fetched if it is on the hub."""
        folder = find_model(self.source, revision=self.revision, output=output)
        with self._opened(folder, shown=str(folder)) as plan:
            yield plan

    @contextmanager
    def outline(self, *, output: Output) -> Iterator[ConversionPlan]:
        """Make a plan from only the headers of a model on the hub."""
        with tempfile.TemporaryDirectory(prefix="miles-outline-") as empty:
            folder = find_model(
                self.source, revision=self.revision, output=output, outline_in=Path(empty)
            )
            shown = self.source if folder == Path(empty) else str(folder)
            with self._opened(folder, shown=shown) as plan:
                yield plan

    @contextmanager
    def _opened(self, folder: Path, *, shown: str) -> Iterator[ConversionPlan]:
        options = {"to": "megatron", "dtype": self.dtype, "file_bytes": self.file_bytes}
        with open_source(folder) as source:
            source.drop_cached_pages()
            plan = plan_megatron(
                source,
                table(load_facts(folder)),
                dtype=dtype_of(self.dtype),
                file_bytes=self.file_bytes,
            )
            yield ConversionPlan(
                source=shown,
                origin={"path": str(folder)},
                table=plan.matched.table,
                files=plan.files,
                write_small_files=plan.write_small_files,
                num_source_tensors=plan.matched.num_tensors,
                num_target_tensors=plan.num_keys,
                dtypes=dict(Counter(dtype_name(place.dtype) for place in plan.placed)),
                notes=_notes(plan),
                fingerprint=fingerprint(folder, options),
                pairs=lambda: _pairs(plan),
                logits_of=lambda written: (folder, written / CHECKPOINT_PART),
            )


def _pairs(plan: MegatronPlan) -> list[tuple[str, str, str]]:
    """Return (name on disk, key or keys of the checkpoint, shape on disk) of every tensor, once."""
    places = {name: ", ".join(keys) for name, keys in plan.keys_by_name().items()}
    carried = (*plan.matched.passthrough, *plan.matched.ignored)
    places |= dict.fromkeys(carried, f"{CARRIED_PART}/")
    return [(name, place, shape_text(plan.source.shape(name))) for name, place in places.items()]


def _notes(plan: MegatronPlan) -> list[str]:
    matched, notes = plan.matched, []
    if matched.lacks_mtp:
        notes.append(
            f"config.json names {count_text(matched.lacks_mtp, 'MTP layer')}, and the folder has "
            "none: converted without"
        )
    elif mtp := len({entry.mtp for entry in matched.table.entries if entry.mtp is not None}):
        notes.append(f"{count_text(mtp, 'MTP layer')} converted")
    if matched.passthrough:
        size = sum(file.size_bytes for file in plan.files if file.name.startswith(CARRIED_PART))
        notes.append(
            f"{count_text(len(matched.passthrough), 'tensor')} that Megatron has no place for "
            f"({matched.passthrough[0]}, ...; {format_bytes(size)})"
            f" {'are' if len(matched.passthrough) > 1 else 'is'} carried along untouched in "
            f"{CARRIED_PART}/"
        )
    if matched.ignored:
        notes.append(
            f"{count_text(len(matched.ignored), 'buffer')} without weights "
            f"({matched.ignored[0]}, ...) carried along in {CARRIED_PART}/"
        )
    if matched.tied_copy:
        notes.append(f"`{matched.tied_copy}` repeats the tied embedding: used once")
    if isinstance(plan.source, QuantisedReader):
        quantised = count_text(len(plan.source.quantised_names()), "quantised tensor")
        notes.append(f"{quantised} ({plan.source.method}) dequantised to bfloat16")
    return notes
