"""The weights of a Hugging Face folder, in the form that a table names: experts may lie stacked on
one side and single on the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import torch

from milescli.checkpoint.source import Source
from milescli.export.stored import Named
from milescli.models.base import Entry, WeightTable


def read_folder(source: Source, table: WeightTable, *, on_disk: WeightTable) -> Iterator[Named]:
    """Every weight of the folder that `table` names, without MTP layers; `on_disk`: the table in
    the folder's own form."""
    trained = [entry for entry in table.entries if entry.mtp is None]
    yield from read_entries(source, trained, on_disk=on_disk)


def read_entries(
    source: Source, entries: Iterable[Entry], *, on_disk: WeightTable
) -> Iterator[Named]:
    """(name on disk as the entries say, tensor), one at a time; of entries whose tensors the folder
    lacks none."""
    for names, unit in groupby(entries, key=lambda entry: entry.hf):
        rows, stacked = [], False
        for entry in unit:
            held, stacked = on_disk.by_megatron[entry.megatron], entry.rule.stacked
            if all(name in source for name in held.hf):
                parts = held.rule.to_parts(
                    [_read(source, name, held.row) for name in held.hf], entry.facts
                )
                rows.append(entry.rule.to_disk(parts, entry.facts))
        if rows:
            yield from zip(
                names,
                [torch.stack(column) for column in zip(*rows, strict=True)] if stacked else rows[0],
                strict=True,
            )


def _read(source: Source, name: str, row: int | None) -> torch.Tensor:
    return source.read(name) if row is None else source.read_row(name, row=row)
