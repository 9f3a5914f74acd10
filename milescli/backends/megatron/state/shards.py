"""Weights of a Megatron model as boxes of Hugging Face tensors, each as a rank holds it. Nothing is
gathered except for the few tensors that disks store in another order than ranks do."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
import torch.distributed as dist

from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.state.gathering import (
    bucket_groups,
    dtypes_of,
    gather_bucket,
    stages_of,
    weights_by_name,
)
from milescli.backends.megatron.state.weights import LocalWeight
from milescli.models.base import Entry, WeightTable
from milescli.plan.types import TrainerLayout
from milescli.weights.base import Bucket
from milescli.weights.shards import (
    PIECES_OF_BOUND,
    Box,
    Part,
    Shard,
    Shards,
    assign,
    cut_to,
    least_busiest,
    whole,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Locates one trainer rank on the axes that cut weights."""

    pp: int
    tp: int
    ep: int
    etp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Describes a part of a tensor, and which ranks hold it."""

    entry: Entry
    index: int
    """Index among the entry's disk tensors."""
    held: Box
    """Box of the tensor that an owner holds, which contains the part."""
    part: Part
    senders: tuple[int, ...] = ()
    """One rank of each group, which sends the part."""


class ShardPlan:
    """Plans which rank sends which box of which tensor. The same on every rank, made once for a
    model, a layout and its engines."""

    def __init__(
        self,
        weights: Sequence[LocalWeight],
        table: WeightTable,
        *,
        mesh: Mesh,
        bucket_bytes: int,
        groups: Sequence[Sequence[int]],
        blocks: Mapping[str, tuple[int, int]] = MappingProxyType({}),
        total_bytes: int = sys.maxsize,
    ) -> None:
        """Plan the sending of the table's weights. `groups`: trainer ranks that reach the same
        engines: each group sends everything once. `blocks`: for matrices that are rounded, the
        blocks that must not be divided. `bucket_bytes` bounds what each rank puts into a bucket,
        `total_bytes` what all ranks do. Collective. Raises LookupError if the ranks of a group do
        not hold everything."""
        self._table, self._mesh = table, mesh
        self._weights = weights_by_name(weights, table)
        self._dtypes = dtypes_of(weights)
        here = Coordinates(pp=mesh.pp_rank, tp=mesh.tp_rank, ep=mesh.ep_rank, etp=mesh.etp_rank)
        everywhere: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, here)
        self._buckets = plan_pieces(
            table,
            self._dtypes,
            layout=mesh.layout,
            ranks=[place for place in everywhere if isinstance(place, Coordinates)],
            bucket_bytes=bucket_bytes,
            groups=groups,
            blocks=blocks,
            total_bytes=total_bytes,
        )
        self._repacked = [self._repacked_in(bucket) for bucket in self._buckets]
        """Entries of each bucket that are gathered."""

    @torch.no_grad()
    def shards(self) -> Iterator[Shards]:
        """Yield all current weights, in buckets. Collective: every rank must consume all of it, and
        every rank gets the same shards."""
        for bucket, repacked in zip(self._buckets, self._repacked, strict=True):
            gathered = dict(self._gather(repacked)) if repacked else {}
            split = dict[str, list[torch.Tensor]]()
            yield [
                Shard(
                    part=piece.part,
                    senders=piece.senders,
                    tensor=self._tensor(piece, gathered, split)
                    if self._mesh.rank in piece.part.owners
                    else None,
                )
                for piece in bucket
            ]

    def _tensor(
        self,
        piece: Piece,
        gathered: Mapping[str, torch.Tensor],
        split: dict[str, list[torch.Tensor]],
    ) -> torch.Tensor:
        entry = piece.entry
        if is_repacked(entry):
            rows = gathered[piece.part.name]
        else:
            if entry.megatron not in split:
                parameter = self._weights[entry.megatron].parameter.detach()
                split[entry.megatron] = entry.rule.split(parameter, entry.facts)
            rows = split[entry.megatron][piece.index]
            if entry.row is not None:
                rows = rows.unsqueeze(0)
        return rows[piece.part.box.within(piece.held)]

    def _repacked_in(self, bucket: Sequence[Piece]) -> list[Entry]:
        """Return the entries of all rows of those stacked tensors whose first row is in the
        bucket."""
        names = {piece.part.name for piece in bucket if is_repacked(piece.entry)}
        if not names:
            return []
        return [entry for entry in self._table.entries if not names.isdisjoint(entry.hf)]

    def _gather(self, entries: Sequence[Entry]) -> Bucket:
        return gather_bucket(
            entries, self._weights, dtypes=self._dtypes, table=self._table, mesh=self._mesh
        )


def is_repacked(entry: Entry) -> bool:
    """Return True if disks store the entry in another order than that in which ranks hold cuts of
    it: it is gathered, and sent whole."""
    return entry.rule.pack is not None or entry.rule.unpack is not None


def plan_pieces(
    table: WeightTable,
    dtypes: Mapping[str, torch.dtype],
    *,
    layout: TrainerLayout,
    ranks: Sequence[Coordinates],
    bucket_bytes: int,
    groups: Sequence[Sequence[int]],
    blocks: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    total_bytes: int = sys.maxsize,
) -> list[list[Piece]]:
    """Return the pieces of each bucket, with senders chosen such that the ranks of each group are
    about equally loaded. Pure; `ranks`: coordinates of each trainer rank; `bucket_bytes` bounds
    what each puts into a bucket, `total_bytes` what all do. Raises LookupError if the ranks of a
    group do not hold everything."""
    owners = _Owners(ranks)
    units = list[list[Piece]]()
    for unit in bucket_groups([entry for entry in table.entries if table.holds(entry)]):
        stages = stages_of(unit, layout=layout, table=table)
        units.append(
            [
                piece
                for entry in unit
                for piece in _pieces_of(
                    entry,
                    table=table,
                    layout=layout,
                    dtype=dtypes[entry.megatron],
                    owners=owners.of(entry, stages[entry.megatron], table=table, layout=layout),
                )
            ]
        )
    units = _with_senders(units, groups, num_ranks=len(ranks), blocks=blocks)
    limits = (bucket_bytes, total_bytes)
    return list(_in_buckets(units, num_ranks=len(ranks), limits=limits))


def _in_buckets(
    units: Sequence[Sequence[Piece]], *, num_ranks: int, limits: tuple[int, int]
) -> Iterator[list[Piece]]:
    """Yield buckets of as many units as fit: no rank, and not all ranks together, may put more
    bytes into a bucket than the two `limits`, unless it has one unit. Gathered units count on every
    rank."""
    bucket = list[Piece]()
    load, total = np.zeros(num_ranks, dtype=np.int64), 0
    for unit in units:
        size = sum(piece.part.size_bytes for piece in unit)
        more = np.zeros_like(load)
        for piece in unit:
            at = slice(None) if is_repacked(piece.entry) else list(piece.senders)
            more[at] += piece.part.size_bytes
        if bucket and ((load + more).max() > limits[0] or total + size > limits[1]):
            yield bucket
            bucket, load, total = [], np.zeros_like(load), 0
        bucket += unit
        load += more
        total += size
    yield bucket


class _Owners:
    """Finds the ranks that hold each cut."""

    def __init__(self, ranks: Sequence[Coordinates]) -> None:
        self._everyone = tuple(range(len(ranks)))
        found = defaultdict[tuple[object, ...], list[int]](list)
        for rank, at in enumerate(ranks):
            for ep in (None, at.ep):
                found["none", at.pp, ep, 0].append(rank)
                found["tp", at.pp, ep, at.tp].append(rank)
                found["etp", at.pp, ep, at.etp].append(rank)
        self._found = {key: tuple(owners) for key, owners in found.items()}

    def of(
        self, entry: Entry, stage: int, *, table: WeightTable, layout: TrainerLayout
    ) -> list[tuple[int, ...]]:
        """Return the owners of each cut of an entry on a pipeline stage."""
        if is_repacked(entry):
            return [self._everyone]
        axis = entry.rule.sharding.axis
        count = {"none": 1, "tp": layout.tp, "etp": layout.etp}[axis]
        ep = None
        if entry.expert is not None:
            ep = entry.expert // (table.facts.num_experts // layout.ep)
        return [self._found[axis, stage, ep, number] for number in range(count)]


def _pieces_of(
    entry: Entry,
    *,
    table: WeightTable,
    layout: TrainerLayout,
    dtype: torch.dtype,
    owners: Sequence[tuple[int, ...]],
) -> Iterator[Piece]:
    """Yield the boxes of an entry's tensors, one for each cut that is not only padding."""
    if is_repacked(entry) and entry.row not in (None, 0):
        return  # the first row stands for the whole tensor
    for index, (name, shape) in enumerate(zip(entry.hf, entry.shapes, strict=True)):
        full = shape if entry.row is None else (table.facts.num_experts, *shape)
        for number, ranks in enumerate(owners):
            if is_repacked(entry):
                box = whole(full)
            else:
                box = _cut_box(entry, shape, number, of=len(owners))
            if box.num_elements:
                part = Part(name=name, shape=full, dtype=dtype, box=box, owners=ranks)
                yield Piece(entry=entry, index=index, held=box, part=part)


def _cut_box(entry: Entry, shape: tuple[int, ...], number: int, *, of: int) -> Box:
    """Return the box of cut `number` of a disk tensor of that shape, without padding."""
    box = whole(shape)
    if of > 1:
        dim = entry.rule.sharding.dim
        length = -(-shape[dim] // of)
        first = min(number * length, shape[dim])
        box = box.along(dim, first, min(first + length, shape[dim]))
    if entry.row is None:
        return box
    return Box(start=(entry.row, *box.start), shape=(1, *box.shape))


def _with_senders(
    units: Sequence[Sequence[Piece]],
    groups: Sequence[Sequence[int]],
    *,
    num_ranks: int,
    blocks: Mapping[str, tuple[int, int]],
) -> list[list[Piece]]:
    """Return the pieces with their senders, split so that each group's ranks are about equally
    loaded."""
    parts = [piece.part for unit in units for piece in unit]
    bound = min(least_busiest(_parts_in_group(parts, group)) for group in groups)
    cut = [
        [
            replace(piece, part=part)
            for piece in unit
            for part in cut_to([piece.part], bound / PIECES_OF_BOUND, blocks.get(piece.part.name))
        ]
        for unit in units
    ]
    parts = [piece.part for unit in cut for piece in unit]
    senders = zip(
        *(assign(_parts_in_group(parts, group), num_ranks=num_ranks) for group in groups),
        strict=True,
    )
    return [[replace(piece, senders=next(senders)) for piece in unit] for unit in cut]


def _parts_in_group(parts: Sequence[Part], group: Sequence[int]) -> list[Part]:
    """Return the parts with only their owners within the group. Raises LookupError if a part has
    none there."""
    members = {*group}
    owners: dict[tuple[int, ...], tuple[int, ...]] = {}
    within = list[Part]()
    for part in parts:
        if part.owners not in owners:
            owners[part.owners] = tuple(rank for rank in part.owners if rank in members)
        if not owners[part.owners]:
            raise LookupError(f"ranks {group} hold nothing of {part.name} {part.box}")
        within.append(replace(part, owners=owners[part.owners]))
    return within
