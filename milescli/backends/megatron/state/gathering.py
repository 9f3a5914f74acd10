"""Gathers weights of a Megatron model that are spread over ranks to whole Hugging Face tensors in
buckets, for engines and checksums. Collective; `weights.load_hf` is the inverse."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby

import torch
import torch.distributed as dist

from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.state.weights import TIED_OUTPUT, LocalWeight
from milescli.models.adapter import Place, merge_weight, pairs_of
from milescli.models.base import Entry, Rule, WeightTable
from milescli.models.facts import ModelFacts
from milescli.plan.legal import stage_ends
from milescli.plan.types import TrainerLayout
from milescli.weights.base import Bucket

Parts = dict[tuple[str, int], torch.Tensor]
"""(Megatron name, number of the part) -> part"""


def hf_buckets(
    weights: Sequence[LocalWeight], table: WeightTable, *, mesh: Mesh, bucket_bytes: int
) -> Iterator[Bucket]:
    """Yield the whole model under Hugging Face names, in buckets of at most `bucket_bytes` (or one
    disk tensor). Collective: every rank must consume all of it, and gets the same tensors, which
    may be views of the parameters."""
    by_name = weights_by_name(weights, table)
    dtypes = dtypes_of(weights)
    bucket: list[Entry] = []
    bucket_size = 0
    for unit in bucket_groups([entry for entry in table.entries if table.holds(entry)]):
        size = sum(dtypes[entry.megatron].itemsize * entry.num_elements for entry in unit)
        if bucket and bucket_size + size > bucket_bytes:
            yield gather_bucket(bucket, by_name, dtypes=dtypes, table=table, mesh=mesh)
            bucket, bucket_size = [], 0
        bucket += unit
        bucket_size += size
    yield gather_bucket(bucket, by_name, dtypes=dtypes, table=table, mesh=mesh)


def weights_by_name(weights: Sequence[LocalWeight], table: WeightTable) -> dict[str, LocalWeight]:
    """Return Megatron name -> weight of this rank, without an output layer that is the
    embedding."""
    return {
        weight.entry.megatron: weight
        for weight in weights
        if not (weight.name == TIED_OUTPUT and table.facts.tied_embeddings)
    }


def merged_buckets(
    buckets: Iterable[Bucket], adapter: Bucket, table: WeightTable, *, scaling: float
) -> Iterator[Bucket]:
    """Yield `buckets` of a base model with the adapter merged in: each matrix W becomes W + scaling
    * B A. `adapter`: all tensors of the adapter, whole; `table`: its table."""
    tensors = dict(adapter)

    def matrix(place: Place) -> torch.Tensor:
        tensor = tensors[place.name]
        return tensor if place.row is None else tensor[place.row]

    places = {f"{module}.weight": pair for module, pair in pairs_of(table).items()}
    for bucket in buckets:
        yield [
            (name, merge_weight(tensor, *map(matrix, places[name]), scaling=scaling))
            if name in places
            else (name, tensor)
            for name, tensor in bucket
        ]


def dtypes_of(weights: Sequence[LocalWeight]) -> Mapping[str, torch.dtype]:
    """Return Megatron name -> dtype in memory, over all ranks: that of the model, except for a few
    weights in float32. Collective."""
    own = {weight.entry.megatron: weight.parameter.dtype for weight in weights}
    [(usual, _)] = Counter(own.values()).most_common(1) or [(None, 0)]
    apart = {name: dtype for name, dtype in own.items() if dtype != usual}
    everywhere: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (usual, apart))
    # a stage none of whose layers has an adapter holds nothing
    held = {usual_there for usual_there, _ in everywhere} - {None}
    assert len(held) == 1, f"ranks hold the model in {held}"
    dtypes: defaultdict[str, torch.dtype] = defaultdict(lambda: next(iter(held)))
    for _, apart_there in everywhere:
        dtypes.update(apart_there)
    return dtypes


def bucket_groups(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Yield the groups of entries that must be in one bucket."""

    def name(unit: list[Entry]) -> object:
        return (unit[0].layer, unit[0].rule.together) if unit[0].rule.together else unit[0].hf

    for _, bundle in groupby(_units(entries), key=name):
        yield [entry for unit in bundle for entry in unit]


def _units(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Group entries that make up the same disk tensors."""
    for _, unit in groupby(entries, key=lambda entry: entry.hf):
        yield list(unit)


@torch.no_grad()
def gather_bucket(
    entries: Sequence[Entry],
    local: dict[str, LocalWeight],
    *,
    dtypes: Mapping[str, torch.dtype],
    table: WeightTable,
    mesh: Mesh,
) -> Bucket:
    """Return whole disk tensors: parts of ranks are joined within each pipeline stage, then sent
    from stage to stage, both with few collectives on flat memory of one dtype, and converted to
    disk tensors. Collective."""
    mine = {entry.megatron: local[entry.megatron] for entry in entries if entry.megatron in local}
    stage_of = stages_of(entries, layout=mesh.layout, table=table)
    kinds = {(stage_of[entry.megatron], dtypes[entry.megatron]) for entry in entries}
    whole: Parts = {}
    for stage, dtype in sorted(kinds, key=str):
        here = [
            entry
            for entry in entries
            if (stage_of[entry.megatron], dtypes[entry.megatron]) == (stage, dtype)
        ]
        tensors = (
            _gather_stage(here, mine, table=table, mesh=mesh, dtype=dtype)
            if mesh.pp_rank == stage
            else None
        )
        whole |= _from_stage(here, tensors, stage=stage, mesh=mesh, dtype=dtype, device=mesh.device)
    return [named for unit in _units(entries) for named in _to_disk(unit, whole)]


def _to_disk(unit: Sequence[Entry], whole: Parts) -> Bucket:
    rows = [
        entry.rule.to_disk(
            [whole[entry.megatron, index] for index in range(len(part_shapes(entry)))], entry.facts
        )
        for entry in unit
    ]
    tensors = (
        [torch.stack(column) for column in zip(*rows, strict=True)]
        if unit[0].rule.stacked
        else rows[0]
    )
    return list(zip(unit[0].hf, tensors, strict=True))


@lru_cache(maxsize=4096)
def _part_shapes(rule: Rule, facts: ModelFacts) -> tuple[torch.Size, ...]:
    disk = [torch.empty(shape, device="meta") for shape in rule.shapes(facts)]
    return tuple(part.shape for part in rule.to_parts(disk, facts))


def part_shapes(entry: Entry) -> tuple[torch.Size, ...]:
    """Return the shapes of the whole parts of an entry."""
    return _part_shapes(entry.rule, entry.facts)


def stages_of(
    entries: Sequence[Entry], *, layout: TrainerLayout, table: WeightTable
) -> dict[str, int]:
    """Return Megatron name -> number of the pipeline stage that has it."""
    ends = stage_ends(layout, table.facts.num_layers)
    stages = {}
    for entry in entries:
        if entry.layer is not None:
            stages[entry.megatron] = next(
                stage for stage, end in enumerate(ends) if entry.layer < end
            )
        else:
            stages[entry.megatron] = 0 if entry.rule.on_first_stage else layout.pp - 1
    return stages


def _gather_stage(
    entries: Sequence[Entry],
    mine: dict[str, LocalWeight],
    *,
    table: WeightTable,
    mesh: Mesh,
    dtype: torch.dtype,
) -> Parts:
    """Return the whole parts of the entries of this rank's own stage."""
    dense = [entry for entry in entries if entry.expert is None]
    whole = _merge(dense, mine, group=mesh.tp_group, size=mesh.layout.tp, table=table)
    experts = [entry for entry in entries if entry.expert is not None]
    if not experts:
        return whole
    per_rank = table.facts.num_experts // mesh.layout.ep
    for owner in range(mesh.layout.ep):
        owned = [
            entry
            for entry in experts
            if entry.expert is not None and entry.expert // per_rank == owner
        ]
        if not owned:
            continue
        tensors = (
            _merge(owned, mine, group=mesh.etp_group, size=mesh.layout.etp, table=table)
            if mesh.ep_rank == owner
            else None
        )
        if mesh.layout.ep > 1:
            tensors = _broadcast(
                owned, tensors, source=owner, group=mesh.ep_group, dtype=dtype, device=mesh.device
            )
        assert tensors is not None
        whole |= tensors
    return whole


def _merge(
    entries: Sequence[Entry],
    mine: dict[str, LocalWeight],
    *,
    group: dist.ProcessGroup,
    size: int,
    table: WeightTable,
) -> Parts:
    """Join the parts of tensor-parallel ranks to whole parts."""
    parts: Parts = {}
    for entry in entries:
        split = entry.rule.split(mine[entry.megatron].parameter.detach(), entry.facts)
        parts |= {(entry.megatron, index): part for index, part in enumerate(split)}
    if size == 1:
        return parts
    cut = [entry for entry in entries if entry.rule.sharding.axis != "none"]
    if not cut:
        return parts
    names = [
        ((entry.megatron, index), entry, shape)
        for entry in cut
        for index, shape in enumerate(part_shapes(entry))
    ]
    flat = torch.cat([parts[name].reshape(-1) for name, _, _ in names])
    gathered = flat.new_empty((size, flat.numel()))
    dist.all_gather_into_tensor(gathered.view(-1), flat, group=group)
    offset = 0
    for name, entry, whole in names:
        shape, dim = parts[name].shape, entry.rule.sharding.dim
        rows = gathered[:, offset : offset + shape.numel()]
        merge_weight = torch.cat([row.view(shape) for row in rows], dim=dim)
        parts[name] = merge_weight.narrow(dim, 0, whole[dim])
        offset += shape.numel()
    return parts


def _from_stage(
    entries: Sequence[Entry],
    tensors: Parts | None,
    *,
    stage: int,
    mesh: Mesh,
    dtype: torch.dtype,
    device: torch.device,
) -> Parts:
    if mesh.layout.pp == 1:
        assert tensors is not None
        return tensors
    return _broadcast(
        entries, tensors, source=stage, group=mesh.pp_group, dtype=dtype, device=device
    )


def _broadcast(
    entries: Sequence[Entry],
    tensors: Parts | None,
    *,
    source: int,
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    device: torch.device,
) -> Parts:
    """Send whole parts of `entries` from rank `source` of the group to the others."""
    shapes = {
        (entry.megatron, index): shape
        for entry in entries
        for index, shape in enumerate(part_shapes(entry))
    }
    if tensors is None:
        flat = torch.empty(
            sum(shape.numel() for shape in shapes.values()), dtype=dtype, device=device
        )
    else:
        flat = torch.cat([tensors[name].reshape(-1) for name in shapes])
    dist.broadcast(flat, src=dist.get_global_rank(group, source), group=group)
    pieces = flat.split([shape.numel() for shape in shapes.values()])
    return {
        name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }
