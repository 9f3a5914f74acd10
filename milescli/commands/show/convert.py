"""Shows conversions on the screen and as JSON: their proof and what can be done next; and previews
with mapping, sizes, free space and time."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING

from milescli.console.output import Output
from milescli.core.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from milescli.conversion.report import Conversion, Preview


def show_conversion(done: Conversion, *, output: Output) -> None:
    """Show the proof of a conversion, and the place of its result."""
    output.json("conversion", asdict(done))
    proof = done.proof
    resumed = (
        f", {format_bytes(done.resumed_bytes)} of it from an earlier attempt"
        if done.resumed_bytes
        else ""
    )
    output.kv(
        {
            "source": f"{proof.num_source_tensors:,} tensors, each used exactly once",
            "target": f"{proof.num_target_tensors:,} tensors, each written exactly once",
            "shapes": "all match config.json",
            "dtypes": ", ".join(f"{name} {count:,}" for name, count in proof.dtypes.items()),
            "finite": "no NaN, no infinity",
            "checksums": proof.checksums,
            "logits": proof.logits,
        },
        title="proof",
    )
    output.kv(
        {
            "path": done.path,
            "model": f"{done.family}, {format_count(done.num_parameters)} parameters",
            "size": f"{format_bytes(done.size_bytes)}{resumed}",
            "time": f"{format_duration(done.seconds)}, {format_bytes(done.bytes_per_s)}/s while "
            "converting",
        },
        title="converted",
    )
    path = shlex.quote(done.path)
    if done.direction == "hf-to-megatron":
        output.next_steps({f"miles convert megatron-to-hf {path} {path}-hf": "convert it back"})
    else:
        output.next_steps({f"python -m sglang.launch_server --model-path {path}": "serve it"})


def show_preview(preview: Preview, *, output: Output) -> None:
    """Show what a conversion would do."""
    output.json("conversion_preview", asdict(preview))
    rows = [(left, right, shape, count) for left, right, shape, count in preview.mapping]
    output.table(["from", "to", "shape", "tensors"], rows, title="mapping")
    output.blank()
    left = preview.size_bytes - preview.finished_bytes
    enough = (
        ""
        if preview.free_bytes > left
        else f": {format_bytes(left - preview.free_bytes)} are missing"
    )
    output.kv(
        {
            "source": preview.source,
            "target": preview.target,
            "model": f"{preview.family}, {format_count(preview.num_parameters)} parameters",
            "to write": f"{format_bytes(preview.size_bytes)} in {preview.num_files:,} files"
            + (
                f", {format_bytes(preview.finished_bytes)} of them from an earlier attempt"
                if preview.finished_bytes
                else ""
            ),
            "free": format_bytes(preview.free_bytes) + enough,
            "time": f"about {format_duration(preview.seconds)} at "
            f"{format_bytes(preview.disk_bytes_per_s)}/s, the speed just measured on this "
            "disk",
        },
        title="would convert",
    )
    for note in preview.notes:
        output.note(note)
    output.note("nothing was written")
