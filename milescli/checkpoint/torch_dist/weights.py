"""Reads Hugging Face tensors from a `torch_dist` checkpoint of any layout, one at a time, through
the weight table. Called by convert, export, evaluation and the trainer's load."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch

from milescli.checkpoint.torch_dist.keys import Box, Item, items_of, names_of
from milescli.checkpoint.torch_dist.reader import TorchDistReader
from milescli.core.errors import CheckpointError
from milescli.models.base import Entry, WeightTable
from milescli.models.transforms import concatenate

_ROW = re.compile(r"\.experts\.experts\.")


class CheckpointWeights:
    """Reads the weights of one checkpoint by the names of one table."""

    def __init__(self, reader: TorchDistReader, table: WeightTable) -> None:
        """Read from `reader`, which the caller closes."""
        self.reader, self.table = reader, table

    @cached_property
    def units(self) -> dict[str, list[Entry]]:
        """Map each name on disk to the entries that hold it: one, or one per expert if they are
        stacked."""
        units: dict[str, list[Entry]] = {}
        for entry in self.table.entries:
            for name in entry.hf:
                units.setdefault(name, []).append(entry)
        return units

    def has(self, entry: Entry) -> bool:
        """Return True if the checkpoint holds the entry. MTP layers may be missing."""
        return all(
            self._box(item) is not None for item in items_of(entry, self.table, stacked=True)
        )

    def dtype(self, entry: Entry) -> torch.dtype:
        """Return the stored dtype of an entry."""
        boxes = [self._require(item) for item in items_of(entry, self.table, stacked=True)]
        widest = self.reader.dtype(boxes[0].key)
        for box in boxes[1:]:
            widest = torch.promote_types(widest, self.reader.dtype(box.key))
        return widest

    def disk(self, entry: Entry) -> list[torch.Tensor]:
        """Return the disk tensors of an entry, or of one expert if they are stacked. Raises
        CheckpointError if the checkpoint lacks it, belongs to another model, or is torn."""
        parts: list[torch.Tensor] = []
        for item in items_of(entry, self.table, stacked=True):
            box = self._require(item)
            tensor = self.reader.read(box.key, box.offsets, box.sizes).reshape(item.shape)
            parts += entry.rule.split(tensor, entry.facts) if item.part is None else [tensor]
        disk = entry.rule.to_disk(parts, entry.facts)
        assert [tuple(tensor.shape) for tensor in disk] == list(entry.shapes), entry.megatron
        return disk

    def rows(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a disk tensor whole, or row by row if experts are stacked."""
        for entry in self.units[name]:
            yield self.disk(entry)[entry.hf.index(name)]

    def _require(self, item: Item) -> Box:
        box = self._box(item)
        if box is None:
            raise CheckpointError(
                f"the checkpoint `{self.reader.folder}` lacks `{item.boxes[-1].key}`",
                why="config.json says that the model has it, so the checkpoint belongs to "
                "another model",
                fix="use the model that the checkpoint was made from",
            )
        stored = self.reader.shape(box.key)
        padded = item.entry.rule.sharding.padded
        if stored != box.whole and not (
            padded and stored[1:] == box.whole[1:] and stored[0] >= box.whole[0]
        ):
            raise CheckpointError(
                f"the checkpoint `{self.reader.folder}` belongs to another model",
                why=f"`{box.key}` contains {list(stored)}, but config.json says {list(box.whole)}",
                fix="use the model that the checkpoint was made from",
            )
        return box

    def _box(self, item: Item) -> Box | None:
        for box in (*item.boxes, *single_boxes(item)):
            if box.key in self.reader:
                return box
        return None


def single_boxes(item: Item) -> Iterator[Box]:
    """Yield the keys of Megatron's `singleton_local_shards`, which store each expert, and gate and
    up, separately."""
    entry = item.entry
    halves = (
        entry.rule.fuse is concatenate
        and not entry.rule.suffixes
        and "linear_fc1" in entry.megatron
    )
    suffix = ("_w", "_v")[item.part] if halves and item.part is not None and item.part < 2 else ""
    for name in names_of(entry):
        key = name if entry.expert is None else _ROW.sub(f".experts.experts.{entry.expert}.", name)
        part = (
            entry.rule.suffixes[item.part] if entry.rule.suffixes and item.part is not None else ""
        )
        if suffix or entry.expert is not None:
            zeros = tuple(0 for _ in item.shape)
            yield Box(key=key + part + suffix, offsets=zeros, sizes=item.shape, whole=item.shape)


def read_hf_tensors(folder: Path, table: WeightTable) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, whole tensor) of every weight, in the order of the table; MTP
    layers only if the checkpoint has them."""
    with TorchDistReader(folder) as reader:
        weights = CheckpointWeights(reader, table)
        for name, entries in weights.units.items():
            if entries[0].mtp is not None and not weights.has(entries[0]):
                continue
            rows = list(weights.rows(name))
            yield name, torch.stack(rows) if entries[0].rule.stacked else rows[0]
