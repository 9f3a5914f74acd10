"""`miles convert hf-to-megatron`: a Hugging Face folder as a `torch_dist` checkpoint that stock
Megatron-Core loads under any layout. Streams, checks itself, and goes on where it was interrupted.
Needs no device."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from milescli.checkpoint import files as disk
from milescli.checkpoint.base import CARRIED, CHECKPOINT, METADATA_NAME, TRACKER_NAME
from milescli.checkpoint.hf_to_megatron import FILE_BYTES, Intake, plan_intake
from milescli.checkpoint.journal import PartFolder, part_of, require_free
from milescli.checkpoint.pipeline import DISK_FULL, DiskFull, Pipeline, PlannedFile
from milescli.checkpoint.record import RECORD_NAME, carry_over, write_plain_config
from milescli.checkpoint.safetensors_file import dtype_name
from milescli.checkpoint.source import open_source
from milescli.checkpoint.torch_dist.metadata import (
    COMMON_NAME,
    make_common,
    make_config,
    make_extra_state,
    make_metadata,
)
from milescli.checkpoint.torch_dist.metadata import CONFIG_NAME as FORMAT_NAME
from milescli.console.transfer import Transfer
from milescli.core.errors import CheckpointError, MilesError, Stopped
from milescli.core.units import format_bytes
from milescli.models import load_facts, table
from milescli.runtime.convert_report import (
    Conversion,
    Preview,
    Proof,
    collapsed,
    fingerprint,
    write_manifest,
)
from milescli.runtime.convert_source import find_model
from milescli.runtime.convert_verify import Verify, verify_logits

if TYPE_CHECKING:
    from milescli.console.output import Output
    from milescli.models import WeightTable

_SPARE_BYTES = 16 * 2**20
"""Room for metadata, config and tokenizer, and for the file system's own needs."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeOptions:
    """Of `miles convert hf-to-megatron`."""

    verify: Verify | None = None
    """None: logits where the model fits into memory, else tensors."""
    dtype: str | None = None
    """bf16, fp16 or fp32; None: as the source has them."""
    revision: str | None = None
    """Of a name on the hub."""
    file_bytes: int = FILE_BYTES


def convert_to_megatron(
    source: str, target: Path, *, options: IntakeOptions, output: Output
) -> Conversion:
    """Write `target`, which must not exist. Raises CheckpointError for a source that is not what
    its config.json says, a target that is there, a full disk; Stopped after Ctrl-C."""
    began = time.monotonic()
    target = target.absolute()
    require_free(target)
    folder = find_model(source, revision=options.revision, output=output)
    lines = table(load_facts(folder))
    with open_source(folder) as opened:
        read_once(opened)
        intake = plan_intake(
            opened, lines, dtype=DTYPES.get(options.dtype or ""), file_bytes=options.file_bytes
        )
        notes = _notes(intake)
        for note in notes:
            output.note(note)
        names = [path.name for path in folder.iterdir() if path.is_file()]
        mark = fingerprint(
            folder,
            names=names,
            options={"to": "megatron", "dtype": options.dtype, "file_bytes": options.file_bytes},
        )
        again = f"miles convert hf-to-megatron {source} {_shown(target)}"
        with PartFolder(target, fingerprint=mark) as part:
            resumed = sum(file.size_bytes for file in part.finished.values())
            tell_of_earlier(part, resumed, output=output)
            with Transfer(
                output, label="converting", total_bytes=intake.size_bytes, done_bytes=resumed
            ) as transfer:
                write_files(
                    part,
                    intake.files,
                    transfer,
                    again=again,
                    check=options.verify is not Verify.NONE,
                )
            with completing(part, again=again):
                _write_rest(part.path, intake, folder)
                compared, difference = verify_logits(
                    folder,
                    part.path / CHECKPOINT,
                    table=intake.matched.table,
                    wish=options.verify,
                    output=output,
                )
                proof = _proof(intake, options, logits=compared, difference=difference)
                write_manifest(
                    part.path,
                    direction="hf-to-megatron",
                    source={"path": str(folder), "given_as": source, "fingerprint": mark},
                    family=lines.facts.family,
                    num_parameters=intake.matched.table.num_parameters,
                    proof=proof,
                    files=list(part.finished.values()),
                    notes=notes,
                )
                part.complete()
    return Conversion(
        direction="hf-to-megatron",
        path=str(target),
        family=lines.facts.family,
        num_parameters=intake.matched.table.num_parameters,
        size_bytes=intake.size_bytes,
        seconds=time.monotonic() - began,
        bytes_per_s=transfer.bytes_per_s,
        resumed_bytes=resumed,
        proof=proof,
        notes=notes,
    )


def read_once(source: object) -> None:
    """Tell a source that its pages need not be kept."""
    opened = getattr(source, "_reader", source)
    opened.read_once()


def tell_of_earlier(part: PartFolder, resumed: int, *, output: Output) -> None:
    """That an interrupted conversion goes on, or that another one's beginnings were thrown away."""
    if resumed:
        output.note(
            f"going on: {format_bytes(resumed)} in {len(part.finished)} files are there from an "
            "earlier attempt"
        )
    elif part.was_other:
        output.note(
            "starting anew: what an earlier attempt left was of another source, or made with other "
            "options"
        )


def write_files(
    part: PartFolder,
    files: tuple[PlannedFile, ...] | list[PlannedFile],
    transfer: Transfer,
    *,
    again: str,
    check: bool,
) -> None:
    """Write what is missing. What is finished stays after Ctrl-C or on a full disk; after any other
    error nothing does."""
    left = sum(file.size_bytes for file in files if file.name not in part.finished)
    _require_room(part, left, again=again)
    try:
        Pipeline(part, progress=transfer, check=check).run(files)
    except DiskFull as error:
        raise _disk_full(part, files, again=again) from error.__cause__
    except KeyboardInterrupt:
        done = sum(file.size_bytes for file in part.finished.values())
        raise Stopped(
            "the conversion was interrupted",
            why=f"{format_bytes(done)} of {format_bytes(transfer.total_bytes)} are finished and "
            f"kept in {part.path}",
            fix=[f"{again}   # goes on", f"rm -r {part.path}"],
        ) from None
    except CheckpointError as error:
        # what a disk or a network failed to read may be read the next time; anything else will be
        # wrong again
        if not isinstance(error.__cause__, OSError):
            part.discard()
        raise


@contextmanager
def completing(part: PartFolder, *, again: str) -> Iterator[None]:
    """While the small files are written and the whole is proven: what fails leaves nothing, but a
    full disk and Ctrl-C leave what is finished."""
    try:
        yield
    except MilesError:
        part.discard()
        raise
    except OSError as error:
        if error.errno in DISK_FULL:
            raise _disk_full(part, [], again=again) from error
        raise
    except KeyboardInterrupt:
        raise Stopped(
            "the conversion was interrupted",
            why=f"everything is written, and kept in {part.path}; it was not proven yet",
            fix=[f"{again}   # goes on", f"rm -r {part.path}"],
        ) from None


def _require_room(part: PartFolder, left: int, *, again: str) -> None:
    free, needed = disk.free_bytes(part.path), left + _SPARE_BYTES
    if left and free < needed:
        done = sum(file.size_bytes for file in part.finished.values())
        if not part.finished:
            part.discard()
        raise CheckpointError(
            "the disk has not room enough",
            why=f"{format_bytes(needed)} are needed"
            + (f" beside the {format_bytes(done)} that are written" if done else "")
            + f", and {format_bytes(free)} are free in {part.target.parent}: "
            f"{format_bytes(needed - free)} are missing",
            fix=[f"make room, then: {again}", "choose a target on another disk"],
        )


def _disk_full(
    part: PartFolder, files: tuple[PlannedFile, ...] | list[PlannedFile], *, again: str
) -> CheckpointError:
    done = sum(file.size_bytes for file in part.finished.values())
    left = sum(file.size_bytes for file in files if file.name not in part.finished) + _SPARE_BYTES
    free = disk.free_bytes(part.path)
    missing = (
        f"{format_bytes(left - free)} more" if left > free else "more than a quota or limit grants"
    )
    return CheckpointError(
        "the disk is full",
        why=f"{format_bytes(done)} are finished and kept in {part.path}; {format_bytes(left)} are "
        f"still to be written, and {format_bytes(free)} are"
        f" free: {missing} must be had",
        fix=[f"make room, then: {again}   # goes on", f"rm -r {part.path}"],
    )


def _write_rest(part: Path, intake: Intake, folder: Path) -> None:
    """Small files: what makes the tensors a checkpoint, and what Megatron has no place for."""
    tensors, carried = part / CHECKPOINT, part / CARRIED
    state, name = make_extra_state(), f"__0_{len(intake.files)}.distcp"
    (tensors / name).write_bytes(state)
    (tensors / METADATA_NAME).write_bytes(make_metadata(intake.placed, empty=(name, len(state))))
    (tensors / COMMON_NAME).write_bytes(make_common())
    (tensors / FORMAT_NAME).write_bytes(make_config())
    carry_over(folder, carried)
    write_plain_config(carried, dtype=None)
    (carried / RECORD_NAME).write_text(intake.record, encoding="utf-8")
    (part / TRACKER_NAME).write_text(CHECKPOINT, encoding="utf-8")


def _notes(intake: Intake) -> list[str]:
    matched, notes = intake.matched, []
    if matched.lacks_mtp:
        notes.append(
            f"config.json names {_count(matched.lacks_mtp, 'MTP layer')}, and the folder has none: "
            "converted without"
        )
    elif mtp := len({entry.mtp for entry in matched.table.entries if entry.mtp is not None}):
        notes.append(f"{_count(mtp, 'MTP layer')} converted")
    if matched.passthrough:
        size = sum(file.size_bytes for file in intake.files if file.name.startswith(CARRIED))
        notes.append(
            f"{_count(len(matched.passthrough), 'tensor')} that Megatron has no place for "
            f"({matched.passthrough[0]}, ...; {format_bytes(size)})"
            f" {'are' if len(matched.passthrough) > 1 else 'is'} carried along untouched in "
            f"{CARRIED}/"
        )
    if matched.ignored:
        notes.append(
            f"{_count(len(matched.ignored), 'buffer')} without weights ({matched.ignored[0]}, ...) "
            f"carried along in {CARRIED}/"
        )
    if matched.tied_copy:
        notes.append(f"`{matched.tied_copy}` repeats the tied embedding: used once")
    if quantised := getattr(intake.source, "quantised_names", None):
        notes.append(
            f"{_count(len(quantised()), 'quantised tensor')} ({intake.source.method}) dequantised "
            "to bfloat16"
        )  # type: ignore[union-attr]
    return notes


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def _proof(
    intake: Intake, options: IntakeOptions, *, logits: str, difference: float | None
) -> Proof:
    checked = "every file read back from the disk: CRC-32 equal to that of the tensors in memory"
    return Proof(
        num_source_tensors=intake.matched.num_tensors,
        num_target_tensors=intake.num_keys,
        dtypes=dict(Counter(dtype_name(each.dtype) for each in intake.placed)),
        checksums="not compared (--verify none)" if options.verify is Verify.NONE else checked,
        logits=logits,
        logits_difference=difference,
    )


def preview_to_megatron(
    source: str, target: Path, *, options: IntakeOptions, output: Output
) -> Preview:
    """What would be done. Fetches no weights; writes nothing but a file that measures the disk,
    which it removes."""
    target = target.absolute()
    require_free(target)
    with tempfile.TemporaryDirectory(prefix="miles-outline-") as empty:
        folder = find_model(
            source, revision=options.revision, output=output, outline_in=Path(empty)
        )
        shown = source if folder == Path(empty) else str(folder)
        with open_source(folder) as opened:
            lines = table(load_facts(folder))
            intake = plan_intake(
                opened, lines, dtype=DTYPES.get(options.dtype or ""), file_bytes=options.file_bytes
            )
            pairs = _pairs(intake)
            pairs += [
                (name, f"{CARRIED}/", shape_text(opened.shape(name)))
                for name in (*intake.matched.passthrough, *intake.matched.ignored)
            ]
            return make_preview(
                source=shown,
                target=target,
                table=intake.matched.table,
                files=list(intake.files),
                pairs=pairs,
                notes=_notes(intake),
            )


def _pairs(intake: Intake) -> list[tuple[str, str, str]]:
    """(name on disk, key or keys of the checkpoint, shape on disk) of every tensor, once."""
    keys: dict[str, list[str]] = {}
    for each in intake.placed:
        for name in each.item.entry.hf:
            keys.setdefault(name, []).append(each.item.boxes[0].key)
    return [
        (name, ", ".join(dict.fromkeys(found)), shape_text(intake.source.shape(name)))
        for name, found in keys.items()
    ]


def make_preview(
    *,
    source: str,
    target: Path,
    table: WeightTable,
    files: list[PlannedFile],
    pairs: list[tuple[str, str, str]],
    notes: list[str],
) -> Preview:
    """With room and speed of the disk that `target` is on."""
    size = sum(file.size_bytes for file in files)
    speed = measure_disk(target.parent)
    part = part_of(target)
    finished = (
        sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
        if part.is_dir()
        else 0
    )
    return Preview(
        source=source,
        target=str(target),
        family=table.facts.family,
        num_parameters=table.num_parameters,
        size_bytes=size,
        num_files=len(files),
        free_bytes=disk.free_bytes(target.parent),
        finished_bytes=finished,
        disk_bytes_per_s=speed,
        seconds=max(size - finished, 0) / speed,
        mapping=collapsed(pairs),
        notes=notes,
    )


def measure_disk(folder: Path, *, size_bytes: int = 128 * 2**20) -> float:
    """Bytes per second of writing and reading back a file of random bytes in the nearest folder
    that is there, and is removed again."""
    while not folder.exists():
        folder = folder.parent
    path = folder / f".miles-speed-{os.getpid()}"
    block = torch.randint(0, 256, (16 * 2**20,), dtype=torch.uint8)
    size_bytes = min(size_bytes, disk.free_bytes(folder) // 4)
    began = time.monotonic()
    try:
        with disk.StreamFile(path) as stream:
            for _ in range(max(1, size_bytes // block.numel())):
                stream.write_tensor(block, crc32=disk.crc32_of(block))
        disk.crc32_of_file(path)
        return stream.size / (time.monotonic() - began)
    finally:
        path.unlink(missing_ok=True)


def shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(str(length) for length in shape) or "scalar"


def _shown(path: Path) -> str:
    return os.path.relpath(path) if Path.cwd() in path.parents else str(path)
