"""Weights of a Megatron model under any layout <-> Hugging Face tensors, both ways through the one table of `models`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from milescli.backends.megatron.mesh import Mesh
from milescli.checkpoint.hf_folder import HfReader
from milescli.core.errors import CheckpointError
from milescli.models.base import Entry, Sharding, WeightTable
from milescli.weights.base import Bucket

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_ENGINE_NAMES = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight$"), "input_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), "pre_mlp_layernorm.weight"),
    (re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$"), r"mlp.experts.local_experts.\2.\1.weight"),
)
"""TransformerEngine's fused modules -> names of Megatron's own modules, which the table uses."""
_ADDS_TO_RESIDUAL = re.compile(r"\.(linear_proj|linear_fc2)\.weight$")
"""The output projections of attention and MLP, of experts too."""
_TIED_OUTPUT = "output_layer.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWeight:
    """A parameter of this rank, and the line of the table that it is (a part of)."""

    name: str
    """As `model.named_parameters()` says."""
    parameter: torch.nn.Parameter
    entry: Entry


def local_weights(model: GPTModel, table: WeightTable, mesh: Mesh) -> list[LocalWeight]:
    """Every parameter of this rank, in the order of the model."""
    first_layer = get_transformer_layer_offset(model.config)
    first_expert = mesh.ep_rank * (table.facts.num_experts // mesh.layout.ep)
    embedding = table.by_megatron["embedding.word_embeddings.weight"]
    found = []
    for name, parameter in model.named_parameters():
        plain = _global_name(name, first_layer=first_layer, first_expert=first_expert)
        tied = plain == _TIED_OUTPUT and table.facts.tied_embeddings
        assert tied or plain in table.by_megatron, f"no rule for the Megatron weight {plain}"
        entry = embedding if tied else table.by_megatron[plain]
        _mark_cut(parameter, entry.rule.sharding)
        found.append(LocalWeight(name=name, parameter=parameter, entry=entry))
    return found


def silence_layers(weights: Sequence[LocalWeight], *, first: int) -> None:
    """Zero what layers `first` and beyond add to the residual stream, so that they pass it through: the model that is left has
    `first` layers. Not undone."""
    for weight in weights:
        if weight.entry.layer is not None and weight.entry.layer >= first and _ADDS_TO_RESIDUAL.search(weight.entry.megatron):
            weight.parameter.data.zero_()


def _mark_cut(parameter: torch.nn.Parameter, sharding: Sharding) -> None:
    """Megatron marks cut parameters while it initialises them, which is left out here; its gradient norm counts by the marks."""
    if sharding.axis != "none" and not hasattr(parameter, "tensor_model_parallel"):
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, sharding.dim, 1)


def _global_name(name: str, *, first_layer: int, first_expert: int) -> str:
    for pattern, plain in _ENGINE_NAMES:
        name = pattern.sub(plain, name)
    name = _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + first_layer}.", name)
    return _EXPERT.sub(lambda match: f".local_experts.{int(match[1]) + first_expert}.", name)


def _cut(sharding: Sharding, mesh: Mesh) -> tuple[int, int]:
    """(parts, this rank's part)"""
    if sharding.axis == "tp":
        return mesh.layout.tp, mesh.tp_rank
    if sharding.axis == "etp":
        return mesh.layout.etp, mesh.etp_rank
    return 1, 0


@torch.no_grad()
def load_hf(weights: Sequence[LocalWeight], table: WeightTable, *, folder: Path, mesh: Mesh) -> None:
    """Fill this rank's parameters, reading only its part of every tensor. Raises CheckpointError for missing or misshapen weights."""
    with HfReader(folder) as reader:
        for weight in weights:
            parts = [_read_part(reader, weight.entry, index, mesh=mesh) for index in range(len(weight.entry.hf))]
            fused = weight.entry.rule.fuse(parts, table.facts)
            assert fused.shape == weight.parameter.shape, (weight.name, fused.shape, weight.parameter.shape)
            weight.parameter.copy_(fused)


def _read_part(reader: HfReader, entry: Entry, index: int, *, mesh: Mesh) -> torch.Tensor:
    name, whole, sharding = entry.hf[index], entry.shapes[index], entry.rule.sharding
    count, number = _cut(sharding, mesh)
    if name not in reader and entry.rule.stacked:
        tensor = _read_stacked(reader, entry, index)
        return tensor.chunk(count, dim=sharding.dim)[number]
    _check_shape(reader, name, expected=whole)
    if count == 1:
        return reader.read(name)
    length = -(-whole[sharding.dim] // count)
    start = min(number * length, whole[sharding.dim])
    end = min(start + length, whole[sharding.dim])
    part = reader.read(name, dim=sharding.dim, start=start, end=end)
    missing = length - (end - start)
    if not missing:
        return part
    assert sharding.padded and sharding.dim == 0, (name, whole, count)
    return torch.cat([part, part.new_zeros((missing, *whole[1:]))])


def _read_stacked(reader: HfReader, entry: Entry, index: int) -> torch.Tensor:
    stacked = entry.rule.stacked[index]
    name = stacked.hf.format(layer=entry.layer)
    whole = entry.shapes[index]
    assert entry.expert is not None, entry
    found = reader.shape(name)
    if found[1:] != (whole[0] * stacked.num_parts, *whole[1:]) or entry.expert >= found[0]:
        raise _misshapen(reader, name, found=found, expected=("experts", whole[0] * stacked.num_parts, *whole[1:]))
    return reader.read_row(name, row=entry.expert).chunk(stacked.num_parts, dim=0)[stacked.part]


def _check_shape(reader: HfReader, name: str, *, expected: tuple[int, ...]) -> None:
    if (found := reader.shape(name)) != expected:
        raise _misshapen(reader, name, found=found, expected=expected)


def _misshapen(reader: HfReader, name: str, *, found: tuple[int, ...], expected: tuple[object, ...]) -> CheckpointError:
    return CheckpointError(
        f"`{reader.folder}`: weights and config.json do not belong together",
        why=f"`{name}` is {list(found)} on disk, and {list(expected)} by config.json",
        fix="fetch the model again",
    )


def hf_buckets(weights: Sequence[LocalWeight], table: WeightTable, *, mesh: Mesh, bucket_bytes: int) -> Iterator[Bucket]:
    """The whole model under Hugging Face names, in buckets of at most `bucket_bytes` (or one line of the table). Collective:
    every rank must consume all of it, and every rank is given the same tensors. Tensors may be views of the parameters."""
    by_name = {
        weight.entry.megatron: weight for weight in weights if not (weight.name == _TIED_OUTPUT and table.facts.tied_embeddings)
    }
    bucket: list[Entry] = []
    held = 0
    element = weights[0].parameter.element_size()
    for entry in table.entries:
        size = element * sum(torch.Size(shape).numel() for shape in entry.shapes)
        if bucket and held + size > bucket_bytes:
            yield _gather_bucket(bucket, by_name, table=table, mesh=mesh)
            bucket, held = [], 0
        bucket.append(entry)
        held += size
    if bucket:
        yield _gather_bucket(bucket, by_name, table=table, mesh=mesh)


@torch.no_grad()
def _gather_bucket(entries: Sequence[Entry], local: dict[str, LocalWeight], *, table: WeightTable, mesh: Mesh) -> Bucket:
    """Cut parts -> whole tensors within each pipeline stage, then from stage to stage; each as few collectives on flat memory."""
    mine = {entry.megatron: local[entry.megatron] for entry in entries if entry.megatron in local}
    dtype, device = next(iter(local.values())).parameter.dtype, mesh.device
    stage_of = _stages(entries, mesh=mesh, table=table)
    whole: dict[str, torch.Tensor] = {}
    for stage in sorted(set(stage_of.values())):
        here = [entry for entry in entries if stage_of[entry.megatron] == stage]
        tensors = _gather_stage(here, mine, table=table, mesh=mesh) if mesh.pp_rank == stage else None
        whole |= _from_stage(here, tensors, stage=stage, mesh=mesh, dtype=dtype, device=device)
    return [(name, whole[name]) for entry in entries for name in entry.hf]


def _stages(entries: Sequence[Entry], *, mesh: Mesh, table: WeightTable) -> dict[str, int]:
    """Megatron name -> pipeline stage that holds it."""
    pp, layers = mesh.layout.pp, table.facts.num_layers
    ends = [sum(layers // pp + (stage < layers % pp) for stage in range(last + 1)) for last in range(pp)]
    stages = {}
    for entry in entries:
        if entry.layer is not None:
            stages[entry.megatron] = next(stage for stage, end in enumerate(ends) if entry.layer < end)
        else:
            stages[entry.megatron] = 0 if entry.megatron.startswith("embedding.") else pp - 1
    return stages


def _gather_stage(
    entries: Sequence[Entry], mine: dict[str, LocalWeight], *, table: WeightTable, mesh: Mesh
) -> dict[str, torch.Tensor]:
    """Hugging Face name -> whole tensor, for entries of this rank's own stage."""
    dense = [entry for entry in entries if entry.expert is None]
    whole = _merge(dense, mine, group=mesh.tp_group, size=mesh.layout.tp, table=table)
    experts = [entry for entry in entries if entry.expert is not None]
    if not experts:
        return whole
    per_rank = table.facts.num_experts // mesh.layout.ep
    for owner in range(mesh.layout.ep):
        owned = [entry for entry in experts if entry.expert is not None and entry.expert // per_rank == owner]
        tensors = (
            _merge(owned, mine, group=mesh.etp_group, size=mesh.layout.etp, table=table) if mesh.ep_rank == owner else None
        )
        if mesh.layout.ep > 1:
            parameter = next(iter(mine.values())).parameter
            tensors = _broadcast(owned, tensors, source=owner, group=mesh.ep_group, dtype=parameter.dtype, device=mesh.device)
        assert tensors is not None
        whole |= tensors
    return whole


def _merge(
    entries: Sequence[Entry], mine: dict[str, LocalWeight], *, group: dist.ProcessGroup, size: int, table: WeightTable
) -> dict[str, torch.Tensor]:
    """Parts of tensor-parallel ranks -> whole tensors."""
    parts = {}
    for entry in entries:
        split = entry.rule.split(mine[entry.megatron].parameter.detach(), table.facts)
        parts |= dict(zip(entry.hf, split, strict=True))
    if size == 1:
        return parts
    cut = [
        (name, entry, index) for entry in entries if entry.rule.sharding.axis != "none" for index, name in enumerate(entry.hf)
    ]
    if not cut:
        return parts
    flat = torch.cat([parts[name].reshape(-1) for name, _, _ in cut])
    gathered = flat.new_empty((size, flat.numel()))
    dist.all_gather_into_tensor(gathered.view(-1), flat, group=group)
    offset = 0
    for name, entry, index in cut:
        shape, dim = parts[name].shape, entry.rule.sharding.dim
        rows = gathered[:, offset : offset + shape.numel()]
        merged = torch.cat([row.view(shape) for row in rows], dim=dim)
        parts[name] = merged.narrow(dim, 0, entry.shapes[index][dim])
        offset += shape.numel()
    return parts


def _from_stage(
    entries: Sequence[Entry],
    tensors: dict[str, torch.Tensor] | None,
    *,
    stage: int,
    mesh: Mesh,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    if mesh.layout.pp == 1:
        assert tensors is not None
        return tensors
    return _broadcast(entries, tensors, source=stage, group=mesh.pp_group, dtype=dtype, device=device)


def _broadcast(
    entries: Sequence[Entry],
    tensors: dict[str, torch.Tensor] | None,
    *,
    source: int,
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Whole tensors of `entries` from rank `source` of the group, which has them, to the others."""
    shapes = {name: torch.Size(shape) for entry in entries for name, shape in zip(entry.hf, entry.shapes, strict=True)}
    if tensors is None:
        flat = torch.empty(sum(shape.numel() for shape in shapes.values()), dtype=dtype, device=device)
    else:
        flat = torch.cat([tensors[name].reshape(-1) for name in shapes])
    dist.broadcast(flat, src=dist.get_global_rank(group, source), group=group)
    pieces = flat.split([shape.numel() for shape in shapes.values()])
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
