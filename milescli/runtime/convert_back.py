"""`miles convert megatron-to-hf`: a `torch_dist` checkpoint of any layout as a Hugging Face folder
that transformers and SGLang load. Streams, checks itself, and goes on where it was interrupted.
Needs no device."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.checkpoint.journal import PartFolder, require_free
from milescli.checkpoint.megatron_to_hf import Outlet, plan_outlet, write_index
from milescli.checkpoint.record import carry_over, write_plain_config
from milescli.checkpoint.safetensors_file import dtype_name
from milescli.console.transfer import Transfer
from milescli.core.units import format_bytes
from milescli.models import load_facts
from milescli.runtime.convert import (
    DTYPES,
    completing,
    make_preview,
    shape_text,
    tell_of_earlier,
    write_files,
)
from milescli.runtime.convert_report import Conversion, Preview, Proof, fingerprint, write_manifest
from milescli.runtime.convert_source import FoundCheckpoint, find_checkpoint, find_model
from milescli.runtime.convert_verify import Verify, verify_logits

if TYPE_CHECKING:
    from milescli.console.output import Output


@dataclass(frozen=True, slots=True, kw_only=True)
class OutletOptions:
    """Of `miles convert megatron-to-hf`."""

    model: str | None = None
    """Folder or hub name of the model whose config.json the checkpoint has; None: SRC knows."""
    step: int | None = None
    """Of a run, or of a folder of checkpoints; None: the newest."""
    verify: Verify | None = None
    dtype: str | None = None
    """bf16, fp16 or fp32; None: as the model's folder had them, else as the checkpoint has them."""
    shard_bytes: int | None = None
    """None: files as the model's folder had them, else 5 GB."""


def convert_to_hf(
    source: Path, target: Path, *, options: OutletOptions, output: Output
) -> Conversion:
    """Write `target`, which must not exist. Raises CheckpointError for a checkpoint that is torn or
    of another model, a target that is there, a full disk; Stopped after Ctrl-C."""
    began = time.monotonic()
    target = target.absolute()
    require_free(target)
    found = _find(source, options, output=output)
    with _plan(found, options) as outlet:
        notes = _notes(outlet)
        for note in notes:
            output.note(note)
        names = [path.name for path in found.tensors.iterdir() if path.is_file()]
        wish = {
            "to": "hf",
            "dtype": options.dtype,
            "shard_bytes": options.shard_bytes,
            "model": _mark_of(found.model_dir),
        }
        mark = fingerprint(found.tensors, names=names, options=wish)
        again = f"miles convert megatron-to-hf {source} {target}"
        with PartFolder(target, fingerprint=mark) as part:
            resumed = sum(file.size_bytes for file in part.finished.values())
            tell_of_earlier(part, resumed, output=output)
            with Transfer(
                output, label="converting", total_bytes=outlet.size_bytes, done_bytes=resumed
            ) as transfer:
                write_files(
                    part,
                    outlet.files,
                    transfer,
                    again=again,
                    check=options.verify is not Verify.NONE,
                )
            with completing(part, again=again):
                _write_rest(part.path, outlet, options)
                compared, difference = verify_logits(
                    part.path,
                    outlet.checkpoint,
                    table=outlet.table,
                    wish=options.verify,
                    output=output,
                )
                proof = Proof(
                    num_source_tensors=outlet.num_keys_used,
                    num_target_tensors=len(outlet.laid),
                    dtypes=dict(Counter(dtype_name(each.dtype) for each in outlet.laid)),
                    checksums="not compared (--verify none)"
                    if options.verify is Verify.NONE
                    else "every file read back from the disk: CRC-32 equal to that of the tensors "
                    "in memory",
                    logits=compared,
                    logits_difference=difference,
                )
                write_manifest(
                    part.path,
                    direction="megatron-to-hf",
                    source={
                        "path": str(found.tensors),
                        "given_as": str(source),
                        "model": str(found.model_dir),
                        "fingerprint": mark,
                    },
                    family=outlet.table.facts.family,
                    num_parameters=outlet.table.num_parameters,
                    proof=proof,
                    files=list(part.finished.values()),
                    notes=notes,
                )
                part.complete()
    return Conversion(
        direction="megatron-to-hf",
        path=str(target),
        family=outlet.table.facts.family,
        num_parameters=outlet.table.num_parameters,
        size_bytes=outlet.size_bytes,
        seconds=time.monotonic() - began,
        bytes_per_s=transfer.bytes_per_s,
        resumed_bytes=resumed,
        proof=proof,
        notes=notes,
    )


def _find(source: Path, options: OutletOptions, *, output: Output) -> FoundCheckpoint:
    model = None
    if options.model is not None:
        model = find_model(options.model, revision=None, output=output)
    found = find_checkpoint(source, model=model, step=options.step)
    output.note(f"{found.what}, with the config of {found.model_dir}")
    return found


def _plan(found: FoundCheckpoint, options: OutletOptions) -> Outlet:
    return plan_outlet(
        found.tensors,
        found.model_dir,
        dtype=DTYPES.get(options.dtype or ""),
        shard_bytes=options.shard_bytes,
    )


def _mark_of(folder: Path) -> str:
    return fingerprint(
        folder, names=[path.name for path in folder.iterdir() if path.is_file()], options={}
    )


def _write_rest(part: Path, outlet: Outlet, options: OutletOptions) -> None:
    carry_over(outlet.model_dir, part)
    written = {
        str(each.dtype).removeprefix("torch.")
        for each in outlet.laid
        if each.dtype.is_floating_point
    }
    said = load_facts(outlet.model_dir).dtype
    name = str(DTYPES[options.dtype]).removeprefix("torch.") if options.dtype is not None else None
    if name is None and outlet.dtypes_are_new and len(written) == 1 and said not in written:
        (name,) = written
    write_plain_config(part, dtype=name)
    if outlet.index is not None:
        write_index(part, outlet.index)


def _notes(outlet: Outlet) -> list[str]:
    notes = []
    if outlet.carried:
        size = sum(each.num_bytes for each in outlet.laid if each.name in set(outlet.carried))
        one = len(outlet.carried) == 1
        notes.append(
            f"{len(outlet.carried):,} tensor{'' if one else 's'} that the checkpoint does not hold "
            f"({outlet.carried[0]}, ...; {format_bytes(size)})"
            f" {'is' if one else 'are'} taken from the model that it began from, as "
            f"{'it was' if one else 'they were'}"
        )
    if outlet.absent_mtp:
        notes.append(
            f"config.json names {outlet.table.facts.num_mtp_layers} MTP layers, and neither the "
            "checkpoint nor the model's folder has them:"
            " written without"
        )
    if outlet.rounded:
        name, (before, after) = next(iter(outlet.rounded.items()))
        notes.append(
            f"{len(outlet.rounded):,} tensors are rounded from {before} to {after} ({name}, ...), "
            "as the model had them or --dtype says"
        )
    return notes


def preview_to_hf(source: Path, target: Path, *, options: OutletOptions, output: Output) -> Preview:
    """What would be done. Writes nothing but a file that measures the disk, which it removes."""
    target = target.absolute()
    require_free(target)
    found = _find(source, options, output=output)
    with _plan(found, options) as outlet:
        carried = set(outlet.carried)
        origin = {name: entries[0].megatron for name, entries in outlet.units.items()}
        pairs = [
            (
                "the model's folder"
                if each.name in carried
                else origin.get(each.name, "embedding.word_embeddings.weight"),
                each.name,
                shape_text(each.shape),
            )
            for each in outlet.laid
        ]
        return make_preview(
            source=str(found.tensors),
            target=target,
            table=outlet.table,
            files=outlet.files,
            pairs=pairs,
            notes=_notes(outlet),
        )
