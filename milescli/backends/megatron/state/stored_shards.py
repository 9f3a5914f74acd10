"""Shards in a number format: each rank rounds its own pieces, and gets the bytes that rounding the
whole matrix would give, since no block of a format crosses ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from milescli.checkpoint.formats.base import Scheme, rounded_by_rows, stored_shapes
from milescli.checkpoint.formats.stored import stored
from milescli.models.precision import Choice
from milescli.weights.shards import Box, Part, Shard, whole


def is_rounded(name: str, choices: Mapping[str, Choice]) -> bool:
    """Return True if `choices` quantises a tensor."""
    choice = choices.get(name)
    return choice is not None and choice.form is not None


def rounded_shard(shard: Shard, choices: Mapping[str, Choice], scheme: Scheme) -> Shard:
    """Return the shard with its numbers rounded to the scheme's, in their own dtype."""
    if shard.tensor is None or not is_rounded(shard.part.name, choices):
        return shard
    return replace(shard, tensor=rounded_by_rows(scheme.codec, shard.tensor))


def stored_shards(shard: Shard, choices: Mapping[str, Choice], scheme: Scheme) -> Iterator[Shard]:
    """Yield the shards of the tensors that the scheme stores in place of a plain one: its numbers,
    its scales. The shard must be a multiple of the scheme's blocks, or the rest of the matrix."""
    part = shard.part
    if not is_rounded(part.name, choices):
        yield shard
        return
    made: dict[str, torch.Tensor] = {}
    if shard.tensor is not None:
        made = dict(_stored(part.name, shard.tensor, choices, scheme))
    if part.box == whole(part.shape) and made and len(part.shape) != 2:
        for name, tensor in made.items():  # gathered: every rank has all of it
            yield _shard(shard, name, tensor.shape, whole(tensor.shape), tensor.dtype, tensor)
        return
    names = scheme.names(part.name)
    shapes = stored_shapes(scheme.codec, part.shape)
    dtypes = _dtypes(part, choices, scheme)
    per = {"values": (1, scheme.codec.per_element), "scale": scheme.codec.block}
    for role, (rows, columns) in per.items():
        box = _reduced(part.box, rows, columns)
        name = names[role]
        yield _shard(shard, name, shapes[role], box, dtypes[name], made.get(name))
    if "shape" in names and part.box.start == (0, 0):
        tensor = torch.tensor(part.shape) if shard.tensor is not None else None
        yield _shard(shard, names["shape"], (2,), whole((2,)), torch.int64, tensor)


def _stored(
    name: str, tensor: torch.Tensor, choices: Mapping[str, Choice], scheme: Scheme
) -> Iterator[tuple[str, torch.Tensor]]:
    return stored([(name, tensor)], choices, scheme, plain=lambda _, same: same)


def _dtypes(part: Part, choices: Mapping[str, Choice], scheme: Scheme) -> dict[str, torch.dtype]:
    """Return name -> dtype of the tensors that the scheme stores in place of a plain one."""
    rows, columns = scheme.codec.block
    block = torch.zeros(rows or 1, max(columns, scheme.codec.per_element), dtype=part.dtype)
    return {name: each.dtype for name, each in _stored(part.name, block, choices, scheme)}


def _reduced(box: Box, rows: int, columns: int) -> Box:
    """Return the box of the elements that each stand for `rows` x `columns` numbers (0: all)."""
    start, end = [], []
    for first, last, size in zip(box.start, box.end, (rows, columns), strict=True):
        assert not size or first % size == 0, (box, rows, columns)
        start.append(first // size if size else 0)
        end.append(-(-last // size) if size else 1)
    shape = tuple(last - first for first, last in zip(start, end, strict=True))
    return Box(start=tuple(start), shape=shape)


def _shard(
    of: Shard,
    name: str,
    shape: tuple[int, ...],
    box: Box,
    dtype: torch.dtype,
    tensor: torch.Tensor | None,
) -> Shard:
    part = Part(name=name, shape=tuple(shape), dtype=dtype, box=box, owners=of.part.owners)
    return Shard(part=part, senders=of.senders, tensor=tensor)
