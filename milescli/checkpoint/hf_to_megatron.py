"""Converts a Hugging Face folder to the files of a `torch_dist` checkpoint: the plan, and the
tensors as they stream. Prints nothing, and uses neither hub nor terminal; `conversion` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from milescli.checkpoint.base import (
    CARRIED_PART,
    CHECKPOINT_PART,
    METADATA_NAME,
    RECORD_NAME,
    TRACKER_NAME,
)
from milescli.checkpoint.hf_folder import HfReader
from milescli.checkpoint.matching import FolderMatch, match
from milescli.checkpoint.pipeline import Piece, PlannedFile, ranges_within
from milescli.checkpoint.record import (
    PASSTHROUGH_PREFIX,
    copy_non_weights,
    record_of,
    write_plain_config,
)
from milescli.checkpoint.safetensors_file import TensorSpec, make_header
from milescli.checkpoint.source import Source, require_finite
from milescli.checkpoint.torch_dist.framing import framing_sizes, make_framing
from milescli.checkpoint.torch_dist.keys import Item, can_stack, find_gap, items_of
from milescli.checkpoint.torch_dist.metadata import (
    COMMON_NAME,
    StoredItem,
    make_common,
    make_config,
    make_extra_state,
    make_metadata,
)
from milescli.checkpoint.torch_dist.metadata import CONFIG_NAME as FORMAT_NAME
from milescli.models import WeightTable
from milescli.models.base import Entry
from milescli.models.transforms import concatenate, identity

FILE_BYTES = 2**30
"""Largest file of the checkpoint, unless one entry is larger: an interruption loses at most one
file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronPlan:
    """Lists every file of the checkpoint. Made from headers alone."""

    source: Source
    matched: FolderMatch
    placed: tuple[StoredItem, ...]
    """Every item, in order."""
    files: tuple[PlannedFile, ...]
    """Files of the checkpoint, then those of passed-through tensors."""
    record: str
    """Content of `hf/source.json`."""
    num_keys: int
    """Keys of the checkpoint, including further names of the same bytes."""

    def keys_by_name(self) -> dict[str, list[str]]:
        """Map each name on disk to the keys of the checkpoint that hold it."""
        keys: dict[str, dict[str, None]] = {}
        for place in self.placed:
            for name in place.item.entry.hf:
                keys.setdefault(name, {})[place.item.boxes[0].key] = None
        return {name: list(own) for name, own in keys.items()}

    def write_small_files(self, folder: Path) -> None:
        """Write the small files next to the planned ones: those that make the tensors a checkpoint,
        and those that Megatron does not store."""
        tensors, carried = folder / CHECKPOINT_PART, folder / CARRIED_PART
        state, name = make_extra_state(), f"__0_{len(self.files)}.distcp"
        (tensors / name).write_bytes(state)
        metadata = make_metadata(self.placed, empty=(name, len(state)))
        (tensors / METADATA_NAME).write_bytes(metadata)
        (tensors / COMMON_NAME).write_bytes(make_common())
        (tensors / FORMAT_NAME).write_bytes(make_config())
        copy_non_weights(self.source.folder, carried)
        write_plain_config(carried, dtype=None)
        (carried / RECORD_NAME).write_text(self.record, encoding="utf-8")
        (folder / TRACKER_NAME).write_text(CHECKPOINT_PART, encoding="utf-8")


def plan_megatron(
    source: Source, table: WeightTable, *, dtype: torch.dtype | None, file_bytes: int = FILE_BYTES
) -> MegatronPlan:
    """Plan the content of every file. `dtype`: of all floating-point weights; None keeps theirs.
    Raises CheckpointError if the folder contradicts its config.json."""
    matched = match(source, table)
    stacked = can_stack(matched.table)
    by_entry: list[tuple[Entry, torch.dtype, tuple[Item, ...]]] = []
    for entry in matched.table.entries:
        own_dtype = matched.dtype(entry, source)
        target = (
            dtype
            if dtype is not None and own_dtype.is_floating_point and not entry.rule.float32
            else own_dtype
        )
        by_entry.append((entry, target, tuple(items_of(entry, matched.table, stacked=stacked))))
    wrong = find_gap(box for _, _, items in by_entry for item in items for box in item.boxes)
    assert wrong is None, wrong
    sizes = [
        sum(framing_sizes(target, item.frame_shapes)[1] for item in items)
        for _, target, items in by_entry
    ]
    placed: list[StoredItem] = []
    files: list[PlannedFile] = []
    for number, within in enumerate(ranges_within(sizes, limit=file_bytes)):
        name = f"__0_{number}.distcp"
        offset = 0
        for _, target, items in (by_entry[place] for place in within):
            for item in items:
                placed.append(StoredItem(item=item, dtype=target, file=name, offset=offset))
                offset += placed[-1].num_bytes
        chosen = [by_entry[place] for place in within]
        files.append(
            PlannedFile(
                name=f"{CHECKPOINT_PART}/{name}",
                size_bytes=offset,
                make=partial(_pieces_of, source, chosen),
            )
        )
    files += _passthrough_files(
        source, (*matched.passthrough, *matched.ignored), file_bytes=4 * file_bytes
    )
    num_keys = len({box.key for place in placed for box in place.item.boxes})
    return MegatronPlan(
        source=source,
        matched=matched,
        placed=tuple(placed),
        files=tuple(files),
        record=record_of(source).to_json(),
        num_keys=num_keys,
    )


def _pieces_of(
    source: Source, chosen: Sequence[tuple[Entry, torch.dtype, tuple[Item, ...]]]
) -> Iterator[Piece]:
    for entry, target, items in chosen:
        yield from _pieces(source, entry, target, items)


def _pieces(
    source: Source, entry: Entry, target: torch.dtype, items: Sequence[Item]
) -> Iterator[Piece]:
    rule = entry.rule
    if rule.unpack is None and (rule.fuse is identity or rule.fuse is concatenate or rule.suffixes):
        # the parts are the disk tensors: one at a time
        for index, item in enumerate(items):
            yield _piece(item, _read(source, entry, index), target)
        return
    parts = rule.to_parts(
        [_read(source, entry, index) for index in range(len(entry.hf))], entry.facts
    )
    for item in items:
        tensor = rule.fuse(parts, entry.facts) if item.part is None else parts[item.part]
        yield _piece(item, tensor, target)


def _read(source: Source, entry: Entry, index: int) -> torch.Tensor:
    name = entry.hf[index]
    tensor = source.read(name) if entry.row is None else source.read_row(name, row=entry.row)
    shown = name if entry.row is None else f"{name}[{entry.row}]"
    require_finite(tensor, name=shown, where=f"`{source.folder}`")
    return tensor


def _piece(item: Item, tensor: torch.Tensor, target: torch.dtype) -> Piece:
    assert tuple(tensor.shape) == item.shape, (item.name, tensor.shape, item.shape)
    if tensor.dtype is not target:
        tensor = tensor.to(target)
        require_finite(tensor, name=item.name, where=f"{target}, which cannot hold it")
    shapes = item.frame_shapes

    def around(crc32: int) -> tuple[bytes, bytes]:
        framing = make_framing(target, shapes, crc32=crc32)
        return framing.head, framing.tail

    return Piece(name=item.name, tensor=tensor, around=around)


def _passthrough_files(
    source: Source, names: Sequence[str], *, file_bytes: int
) -> list[PlannedFile]:
    specs = [
        TensorSpec(name=name, dtype=source.dtype(name), shape=source.shape(name)) for name in names
    ]
    files = []
    for number, within in enumerate(
        ranges_within((spec.num_bytes for spec in specs), limit=file_bytes)
    ):
        chosen = [specs[place] for place in within]
        name = f"{CARRIED_PART}/{PASSTHROUGH_PREFIX}-{number:05d}.safetensors"
        files.append(safetensors_file(name, chosen, partial(_raw, source, chosen)))
    return files


def _raw(source: Source, specs: Sequence[TensorSpec]) -> Iterator[Piece]:
    for spec in specs:
        tensor = source.read(spec.name)
        require_finite(tensor, name=spec.name, where=f"`{source.folder}`")
        yield Piece(name=spec.name, tensor=tensor)


def safetensors_file(
    name: str, specs: Sequence[TensorSpec], make, *, metadata: dict[str, str] | None = None
) -> PlannedFile:
    """Plan a safetensors file, whose tensors `make` yields in this order."""
    header = make_header(specs, {"format": "pt"} if metadata is None else metadata)
    size = len(header) + sum(spec.num_bytes for spec in specs)
    return PlannedFile(name=name, size_bytes=size, make=make, start=header)


def open_passthrough(folder: Path) -> HfReader | None:
    """Open the tensors that were passed through; None if there are none."""
    return HfReader(folder) if any(folder.glob(f"{PASSTHROUGH_PREFIX}-*.safetensors")) else None
