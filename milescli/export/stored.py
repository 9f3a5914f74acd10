"""Reads plain tensors of a folder, and compares what was written with what was read back. Holds one
tensor in memory at a time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from milescli.checkpoint.formats.base import Scheme, row_chunks
from milescli.checkpoint.formats.stored import Named, matrices
from milescli.checkpoint.source import QuantisedReader, Source
from milescli.core.errors import CheckpointError
from milescli.models.base import Entry, WeightTable
from milescli.models.precision import Choice


@dataclass(slots=True, kw_only=True)
class ReadBackErrors:
    """Holds the result of reading back, over all quantised tensors."""

    num_plain: int = 0
    """Number of tensors that are stored unquantised: equal to the bit."""
    num_quantised: int = 0
    worst_share_of_bound: float = 0.0
    """Largest |difference| to the weight, relative to the rounding error that the format allows at
    that number."""
    squared_difference: float = 0.0
    squared_weight: float = 0.0

    @property
    def relative_error(self) -> float:
        """Return the root of the mean squared difference, relative to that of the weights."""
        return (
            math.sqrt(self.squared_difference / self.squared_weight) if self.squared_weight else 0.0
        )

    def add(self, other: ReadBackErrors) -> None:
        """Add what was read back of other tensors."""
        self.num_plain += other.num_plain
        self.num_quantised += other.num_quantised
        self.worst_share_of_bound = max(self.worst_share_of_bound, other.worst_share_of_bound)
        self.squared_difference += other.squared_difference
        self.squared_weight += other.squared_weight


def plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to its stored dtype; integers stay."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def compare(
    tensors: Iterable[Named],
    source: Source,
    choices: Mapping[str, Choice],
    dtypes: Mapping[str, torch.dtype],
    scheme: Scheme | None,
) -> ReadBackErrors:
    """Compare the tensors on disk with `tensors`, which are made again: plain ones bit for bit,
    quantised ones with the weight, element by element within the format's bound. Raises
    CheckpointError that names the first tensor that differs or is superfluous."""
    measured = ReadBackErrors()
    seen = set()
    for name, tensor in tensors:
        seen.add(name)
        if name not in source:
            raise _mismatch_error(name, why="it is missing from the folder")
        choice = choices.get(name)
        if source.shape(name) != tuple(tensor.shape):
            raise _mismatch_error(
                name, why=f"it is {list(source.shape(name))} on disk, but was {list(tensor.shape)}"
            )
        if choice is None or choice.form is None:
            on_disk = source.read_region(name, *((0, length) for length in tensor.shape))
            expected = plain(tensor, dtypes[name])
            if on_disk.dtype != expected.dtype or not torch.equal(on_disk, expected):
                raise _mismatch_error(name, why="the content on disk differs from what was written")
            measured.num_plain += 1
            continue
        assert isinstance(source, QuantisedReader) and scheme is not None
        _compare_quantised(name, tensor, source, scheme, measured)
        measured.num_quantised += 1
    if extra := sorted(set(source.names()) - seen):
        raise _mismatch_error(extra[0], why="this name should not exist in the export")
    return measured


def _compare_quantised(
    name: str, tensor: Tensor, source: QuantisedReader, scheme: Scheme, measured: ReadBackErrors
) -> None:
    parts = source.parts(name)
    if parts is None:
        raise _mismatch_error(name, why="it should be quantised, but is not")
    codec = scheme.codec
    for number, matrix in enumerate(matrices(tensor, scheme)):
        one = {role: part[number] if scheme.transposed else part for role, part in parts.items()}
        if scheme.grouped:
            one["values"] = one["values"].flatten(-2)
        for first, end in row_chunks(codec, *matrix.shape):
            piece = matrix[first:end].float()
            size = codec.block[0] or len(matrix)
            own = {
                **one,
                "values": one["values"][first:end],
                "scale": one["scale"][first // size : -(-end // size)],
            }
            difference = (codec.dequantise(own)[:, : piece.shape[1]] - piece).abs()
            share = float((difference / codec.bound(piece, own)).max())
            # NaN is not within
            if not share <= 1:
                where = divmod(
                    int((difference / codec.bound(piece, own)).nan_to_num(torch.inf).argmax()),
                    piece.shape[1],
                )
                row, column = first + where[0], where[1]
                raise _mismatch_error(
                    name,
                    why=f"at [{row}, {column}] {codec.name} reads "
                    f"{float(codec.dequantise(own)[where]):.6g} for {float(piece[where]):.6g}, "
                    f"{share:.3g} times what its rounding allows",
                )
            measured.worst_share_of_bound = max(measured.worst_share_of_bound, share)
            measured.squared_difference += float((difference.double() ** 2).sum())
            measured.squared_weight += float((piece.double() ** 2).sum())


def _mismatch_error(name: str, *, why: str) -> CheckpointError:
    return CheckpointError(
        f"`{name}` was exported incorrectly, and the folder was removed",
        why=why,
        fix="export again; if it fails again, report it: the disk or miles has a fault",
    )


def read_folder(source: Source, table: WeightTable, *, on_disk: WeightTable) -> Iterator[Named]:
    """Yield every weight of the folder that `table` names, without MTP layers; `on_disk` is the
    table in the folder's own form."""
    trained = [entry for entry in table.entries if entry.mtp is None]
    yield from read_entries(source, trained, on_disk=on_disk)


def read_entries(
    source: Source, entries: Iterable[Entry], *, on_disk: WeightTable
) -> Iterator[Named]:
    """Yield (name on disk as in the entries, tensor), one at a time; skips entries whose tensors
    the folder lacks."""
    for names, unit in groupby(entries, key=lambda entry: entry.hf):
        rows, stacked = [], False
        for entry in unit:
            disk_entry, stacked = on_disk.by_megatron[entry.megatron], entry.rule.stacked
            if all(name in source for name in disk_entry.hf):
                parts = disk_entry.rule.to_parts(
                    [_read(source, name, disk_entry.row) for name in disk_entry.hf], entry.facts
                )
                rows.append(entry.rule.to_disk(parts, entry.facts))
        if rows:
            yield from zip(
                names,
                [torch.stack(column) for column in zip(*rows, strict=True)] if stacked else rows[0],
                strict=True,
            )


def converted(
    tensors: Iterable[Named], *, given: WeightTable, wanted: WeightTable
) -> Iterator[Named]:
    """Yield tensors that have the names and forms of the table `given` in those of `wanted`, as
    soon as all parts of a tensor are there."""
    entries = defaultdict[str, list[Entry]](list)
    units = defaultdict[tuple[str, ...], set[int | None]](set)
    for entry in given.entries:
        for name in entry.hf:
            entries[name].append(entry)
    for entry in wanted.entries:
        units[entry.hf].add(entry.row)
    parts = defaultdict[str, dict[str, Tensor]](dict)
    rows = defaultdict[tuple[str, ...], dict[int | None, list[Tensor]]](dict)
    for name, tensor in tensors:
        for entry in entries[name]:
            parts[entry.megatron][name] = tensor if entry.row is None else tensor[entry.row]
            if len(parts[entry.megatron]) < len(entry.hf):
                continue
            stored = parts.pop(entry.megatron)
            whole = entry.rule.to_parts([stored[one] for one in entry.hf], entry.facts)
            target = wanted.by_megatron[entry.megatron]
            rows[target.hf][target.row] = target.rule.to_disk(whole, target.facts)
            if rows[target.hf].keys() == units[target.hf]:
                done = rows.pop(target.hf)
                columns = zip(*(done[row] for row in sorted(done)), strict=True)
                made = [torch.stack(c) for c in columns] if target.rule.stacked else done[None]
                yield from zip(target.hf, made, strict=True)


def _read(source: Source, name: str, row: int | None) -> torch.Tensor:
    return source.read(name) if row is None else source.read_row(name, row=row)
