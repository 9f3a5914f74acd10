"""Weights of a Megatron model as boxes of Hugging Face tensors, each as a rank holds it: nothing is
gathered, but for the few tensors that disks store in another order than ranks do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.state.gathering import (
    bundled,
    dtypes_of,
    gather_bucket,
    held_once,
    stages_of,
)
from milescli.backends.megatron.state.weights import LocalWeight
from milescli.models.base import Entry, Sharding, WeightTable
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
class _Coordinates:
    """Places one trainer rank."""

    pp: int
    tp: int
    ep: int
    etp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A part, and where its ranks have it."""

    entry: Entry
    index: int
    """Of the entry's disk tensors."""
    held: Box
    """What an owner holds of the tensor; the part is in it."""
    part: Part
    senders: tuple[int, ...] = ()


class ShardPlan:
    """Says who sends which box of which tensor. The same on every rank, made once for a model, a
    layout and its engines."""

    def __init__(
        self,
        weights: Sequence[LocalWeight],
        table: WeightTable,
        *,
        mesh: Mesh,
        bucket_bytes: int,
        groups: Sequence[Sequence[int]],
    ) -> None:
        """Plan the sending of the table's weights. `groups` are trainer ranks that reach the same
        engines: each sends everything once. Collective. Raises LookupError if the ranks of a group
        do not hold everything."""
        self._table, self._mesh = table, mesh
        self._weights = held_once(weights, table)
        self._dtypes = dtypes_of(weights)
        here = _Coordinates(pp=mesh.pp_rank, tp=mesh.tp_rank, ep=mesh.ep_rank, etp=mesh.etp_rank)
        everywhere: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, here)
        self._ranks = [place for place in everywhere if isinstance(place, _Coordinates)]
        buckets = [
            list(self._pieces_of(bucket))
            for bucket in bundled(table, self._dtypes, bucket_bytes=bucket_bytes)
        ]
        self.buckets = _sent(buckets, groups, num_ranks=len(self._ranks))
        """Pieces of each bucket."""

    @torch.no_grad()
    def shards(self) -> Iterator[Shards]:
        """Yield all weights as they are now, in buckets. Collective: every rank must consume all
        of it, and every rank gets the same shards."""
        for bucket in self.buckets:
            repacked = dict.fromkeys(
                entry.megatron for entry in _entries(bucket) if is_repacked(entry)
            )
            gathered = dict(self._gather(bucket) if repacked else [])
            split = dict[str, list[torch.Tensor]]()
            yield [
                Shard(
                    part=piece.part,
                    senders=piece.senders,
                    tensor=self._tensor(piece, gathered, split),
                )
                for piece in bucket
            ]

    def _tensor(
        self,
        piece: _Piece,
        gathered: dict[str, torch.Tensor],
        split: dict[str, list[torch.Tensor]],
    ) -> torch.Tensor | None:
        entry = piece.entry
        if self._mesh.rank not in piece.part.owners:
            return None
        if is_repacked(entry):
            held = gathered[piece.part.name]
        else:
            if entry.megatron not in split:
                parameter = self._weights[entry.megatron].parameter.detach()
                split[entry.megatron] = entry.rule.split(parameter, entry.facts)
            held = split[entry.megatron][piece.index]
            if entry.row is not None:
                held = held.unsqueeze(0)
        return held[piece.part.box.within(piece.held)]

    def _gather(self, bucket: Sequence[_Piece]) -> list[tuple[str, torch.Tensor]]:
        names = {piece.part.name for piece in bucket if is_repacked(piece.entry)}
        entries = [entry for entry in self._table.entries if names & {*entry.hf}]
        return gather_bucket(
            entries, self._weights, dtypes=self._dtypes, table=self._table, mesh=self._mesh
        )

    def _pieces_of(self, bucket: Sequence[Entry]) -> Iterator[_Piece]:
        """Yield the boxes of a bucket's tensors, as ranks hold them."""
        stages = stages_of(bucket, mesh=self._mesh, table=self._table)
        for entry in bucket:
            if is_repacked(entry) and entry.row not in (None, 0):
                continue  # the first row stands for the whole tensor
            for index, (name, shape) in enumerate(zip(entry.hf, entry.shapes, strict=True)):
                full = shape if entry.row is None else (self._table.facts.num_experts, *shape)
                for number, box in self._boxes(entry, shape, full):
                    part = Part(
                        name=name,
                        shape=full,
                        dtype=self._dtypes[entry.megatron],
                        box=box,
                        owners=tuple(
                            rank
                            for rank, place in enumerate(self._ranks)
                            if self._holds(place, entry, number, stage=stages[entry.megatron])
                        ),
                    )
                    yield _Piece(entry=entry, index=index, held=box, part=part)

    def _boxes(
        self, entry: Entry, shape: tuple[int, ...], full: tuple[int, ...]
    ) -> list[tuple[int, Box]]:
        """(number of the cut, box): what is not padding of each cut of a tensor."""
        if is_repacked(entry):
            return [(0, whole(full))]
        boxes = list[tuple[int, Box]]()
        sharding = entry.rule.sharding
        count = self._count(sharding)
        length = -(-shape[sharding.dim] // count) if count > 1 else 0
        for number in range(count):
            box = whole(shape)
            if count > 1:
                first = min(number * length, shape[sharding.dim])
                box = box.along(sharding.dim, first, min(first + length, shape[sharding.dim]))
            if entry.row is not None:
                box = Box(start=(entry.row, *box.start), shape=(1, *box.shape))
            if box.num_elements:
                boxes.append((number, box))
        return boxes

    def _count(self, sharding: Sharding) -> int:
        layout = self._mesh.layout
        return {"none": 1, "tp": layout.tp, "etp": layout.etp}[sharding.axis]

    def _holds(self, place: _Coordinates, entry: Entry, number: int, *, stage: int) -> bool:
        """Say whether a rank has cut `number` of an entry that is on a stage."""
        if is_repacked(entry):
            return True  # once it is gathered
        if place.pp != stage:
            return False
        if entry.expert is not None:
            per_rank = self._table.facts.num_experts // self._mesh.layout.ep
            if place.ep != entry.expert // per_rank:
                return False
        axis = entry.rule.sharding.axis
        return axis == "none" or number == (place.tp if axis == "tp" else place.etp)


def is_repacked(entry: Entry) -> bool:
    """Return True if disks store the entry in another order than ranks can hold cuts of: it is
    gathered, and sent whole."""
    return entry.rule.pack is not None or entry.rule.unpack is not None


def _entries(bucket: Sequence[_Piece]) -> Iterator[Entry]:
    return (piece.entry for piece in bucket)


def _sent(
    buckets: Sequence[Sequence[_Piece]], groups: Sequence[Sequence[int]], *, num_ranks: int
) -> list[list[_Piece]]:
    """The pieces with their senders, cut so that each group's ranks are about equally loaded."""
    parts = [piece.part for bucket in buckets for piece in bucket]
    bound = min(least_busiest(_held_by(parts, group)) for group in groups)
    cut = [
        [
            replace(piece, part=part)
            for piece in bucket
            for part in cut_to([piece.part], bound / PIECES_OF_BOUND)
        ]
        for bucket in buckets
    ]
    parts = [piece.part for bucket in cut for piece in bucket]
    senders = zip(
        *(assign(_held_by(parts, group), num_ranks=num_ranks) for group in groups), strict=True
    )
    return [[replace(piece, senders=next(senders)) for piece in bucket] for bucket in cut]


def _held_by(parts: Sequence[Part], group: Sequence[int]) -> list[Part]:
    """The parts, owned by ranks of the group alone. Raises LookupError if one has no owner
    there."""
    members = {*group}
    held = [
        replace(part, owners=tuple(rank for rank in part.owners if rank in members))
        for part in parts
    ]
    for part in held:
        if not part.owners:
            raise LookupError(f"ranks {group} hold nothing of {part.name} {part.box}")
    return held
