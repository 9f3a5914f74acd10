"""Converts plain tensors to those that a folder stores, and compares them with what was read back.
Holds one tensor in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from milescli.checkpoint.formats.base import Scheme, quantise_by_rows, row_chunks
from milescli.checkpoint.source import QuantisedReader, Source, require_finite
from milescli.core.errors import CheckpointError
from milescli.export.choose import Choice
from milescli.models.base import Entry, WeightTable

ORIGINAL_DTYPE = torch.bfloat16
"""Weights are rounded to it before they are quantised: it is what engines and releases hold."""
Named = tuple[str, Tensor]


@dataclass(slots=True, kw_only=True)
class Measured:
    """Holds the result of reading back, over all quantised tensors."""

    num_plain: int = 0
    """Tensors that are stored plain: equal to the bit."""
    num_quantised: int = 0
    worst_share_of_bound: float = 0.0
    """Largest |difference| to the bfloat16 weight, as a part of what the format's rounding allows
    at that number."""
    squared_difference: float = 0.0
    squared_weight: float = 0.0

    @property
    def relative_error(self) -> float:
        """Return the root of the mean squared difference, relative to that of the weights."""
        return (
            math.sqrt(self.squared_difference / self.squared_weight) if self.squared_weight else 0.0
        )


def stored(
    tensors: Iterable[Named], choices: Mapping[str, Choice], dtypes: Mapping[str, torch.dtype]
) -> Iterator[Named]:
    """Yield (name, tensor) as the folder stores them. Names without a choice are plain; `dtypes`
    are those of plain tensors by name.

    Tensors that share a global scale must be consecutive. Raises CheckpointError for a weight that
    is not finite in its stored dtype.
    """
    waiting: list[Named] = []
    for name, tensor in tensors:
        choice = choices.get(name)
        tensor = plain(tensor, ORIGINAL_DTYPE if choice and choice.scheme else dtypes[name])
        require_finite(tensor, name=name, where="the weights that are exported")
        if choice is None or choice.scheme is None:
            yield name, tensor
            continue
        waiting.append((name, tensor))
        together = {other for other in choice.fused if choices[other].scheme}
        if not choice.scheme.codec.needs_largest or {module for module, _ in waiting} == together:
            yield from _quantised(waiting, choices)
            waiting = []
    assert not waiting, [name for name, _ in waiting]


def plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to its stored dtype; integers stay."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _quantised(waiting: Iterable[Named], choices: Mapping[str, Choice]) -> Iterator[Named]:
    listed = list(waiting)
    largest = torch.stack([tensor.abs().max() for _, tensor in listed]).max().float()
    for name, tensor in listed:
        scheme = choices[name].scheme
        assert scheme is not None
        names = scheme.names(name)
        pieces = [
            quantise_by_rows(scheme.codec, matrix, largest) for matrix in matrices(tensor, scheme)
        ]
        for role in pieces[0]:
            whole = (
                torch.stack([piece[role] for piece in pieces])
                if scheme.transposed
                else pieces[0][role]
            )
            grouped = role == "values" and scheme.grouped
            size = scheme.codec.block[1] // scheme.codec.per_element
            yield names[role], whole.unflatten(-1, (-1, size)) if grouped else whole
        if "shape" in names:
            yield names["shape"], torch.tensor(tensor.shape)


def matrices(tensor: Tensor, scheme: Scheme) -> Iterator[Tensor]:
    """Yield [rows, columns] as they are quantised: the tensor itself, or each of stacked experts,
    transposed."""
    if not scheme.transposed:
        yield tensor
        return
    for row in tensor:
        yield row.transpose(-1, -2)


def compare(
    tensors: Iterable[Named],
    source: Source,
    choices: Mapping[str, Choice],
    dtypes: Mapping[str, torch.dtype],
) -> Measured:
    """Compare what is on disk with `tensors`, which are made again: plain ones bit for bit,
    quantised ones with the bfloat16 weight, element by element within the format's bound. Raises
    CheckpointError that names the first tensor that fails or is superfluous."""
    measured = Measured()
    seen = set()
    for name, tensor in tensors:
        seen.add(name)
        if name not in source:
            raise _wrong(name, why="it is not in the folder")
        choice = choices.get(name)
        if source.shape(name) != tuple(tensor.shape):
            raise _wrong(
                name, why=f"it is {list(source.shape(name))} on disk, and was {list(tensor.shape)}"
            )
        if choice is None or choice.scheme is None:
            on_disk = source.read_region(name, *((0, length) for length in tensor.shape))
            expected = plain(tensor, dtypes[name])
            if on_disk.dtype != expected.dtype or not torch.equal(on_disk, expected):
                raise _wrong(name, why="what was read back is not what was written")
            measured.num_plain += 1
            continue
        assert isinstance(source, QuantisedReader)
        _compare_quantised(name, tensor.to(ORIGINAL_DTYPE), source, choice.scheme, measured)
        measured.num_quantised += 1
    if extra := sorted(set(source.names()) - seen):
        raise _wrong(extra[0], why="nothing was to be written under this name")
    return measured


def _compare_quantised(
    name: str, tensor: Tensor, source: QuantisedReader, scheme: Scheme, measured: Measured
) -> None:
    parts = source.parts(name)
    if parts is None:
        raise _wrong(name, why="it was read back plain, and was to be quantised")
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
                raise _wrong(
                    name,
                    why=f"at [{row}, {column}] {codec.name} reads "
                    f"{float(codec.dequantise(own)[where]):.6g} for {float(piece[where]):.6g}, "
                    f"{share:.3g} times what its rounding allows",
                )
            measured.worst_share_of_bound = max(measured.worst_share_of_bound, share)
            measured.squared_difference += float((difference.double() ** 2).sum())
            measured.squared_weight += float((piece.double() ** 2).sum())


def _wrong(name: str, *, why: str) -> CheckpointError:
    return CheckpointError(
        f"`{name}` was not exported rightly, and the folder was removed",
        why=why,
        fix="export again; if it stays, the disk or miles is at fault: please report it",
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


def _read(source: Source, name: str, row: int | None) -> torch.Tensor:
    return source.read(name) if row is None else source.read_row(name, row=row)
