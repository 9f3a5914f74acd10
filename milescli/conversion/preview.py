"""`miles convert --dry-run`: mapping, sizes, room and time of a conversion. Fetches no weights;
writes nothing but a file that measures the disk, which it removes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from milescli.checkpoint import files as disk
from milescli.checkpoint import integrity
from milescli.checkpoint.journal import part_of, read_journal, require_free
from milescli.conversion.base import ConversionPlan, Direction
from milescli.conversion.report import Preview, collapsed
from milescli.core.units import format_bytes

if TYPE_CHECKING:
    from milescli.console.output import Output


def preview(direction: Direction, target: Path, *, output: Output) -> Preview:
    """What `convert` would do. Raises as it does."""
    target = target.absolute()
    require_free(target)
    with direction.outline(output=output) as plan:
        speed = measure_disk(target.parent)
        finished, notes = _earlier(part_of(target), plan)
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
            mapping=collapsed(plan.pairs()),
            notes=[*plan.notes, *notes],
        )


def _earlier(part: Path, plan: ConversionPlan) -> tuple[int, list[str]]:
    """(bytes that an earlier attempt has finished of this, what there is to say of one at something
    else)"""
    journal = read_journal(part)
    if journal.fingerprint == plan.fingerprint:
        return journal.finished_bytes, []
    if not journal.finished:
        return 0, []
    return 0, [
        f"{part} holds {format_bytes(journal.finished_bytes)} that were made from another source, "
        f"or with other options; this goes on with it: {journal.resume_command or 'not known'}"
    ]


def measure_disk(folder: Path, *, size_bytes: int = 128 * 2**20) -> float:
    """Bytes per second of writing and reading back a file of random bytes in the nearest folder
    that is there, and is removed again."""
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
