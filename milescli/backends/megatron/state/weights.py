"""Maps this rank's parameters to the entries of the weight table, and loads them from a Hugging
Face folder. `gathering` is the inverse."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.state.saving import release_state
from milescli.checkpoint.source import Source, open_source
from milescli.core.errors import CheckpointError
from milescli.models.base import Entry, Sharding, WeightTable
from milescli.models.engine_names import megatron_name
from milescli.models.mtp import require_mtp_weights

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_ADDS_TO_RESIDUAL = re.compile(r"\.(linear_proj|linear_fc2|out_proj)\.(weight|bias)$")
"""The output projections of every mixer and MLP, of experts too."""
_SCALES_RESIDUAL = re.compile(r"\.layer_scalar$")
TIED_OUTPUT = "output_layer.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWeight:
    """Pairs a parameter of this rank with its entry of the table."""

    name: str
    """Name in `model.named_parameters()`."""
    parameter: torch.Tensor
    """The parameter, or a buffer that is saved (the router's bias)."""
    entry: Entry


def local_weights(
    model: GPTModel, table: WeightTable, mesh: Mesh, *, of_adapter: bool = False
) -> list[LocalWeight]:
    """Return every parameter of this rank, and every buffer in the table, in the order of the
    model. `of_adapter`: the table is an adapter's, and other parameters are left out."""
    first_layer = get_transformer_layer_offset(model.config)
    first_expert = mesh.ep_rank * (table.facts.num_experts // mesh.layout.ep)
    embedding = table.by_megatron.get("embedding.word_embeddings.weight")
    local = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        plain = _global_name(name, first_layer=first_layer, first_expert=first_expert)
        tied = plain == TIED_OUTPUT and table.facts.tied_embeddings and embedding is not None
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        assert of_adapter or not is_parameter or tied or plain in table.by_megatron, (
            f"no rule for the Megatron weight {plain}"
        )
        if not tied and plain not in table.by_megatron:
            continue
        entry = embedding if tied and embedding else table.by_megatron[plain]
        if is_parameter:
            _mark_cut(tensor, entry.rule.sharding)
        local.append(LocalWeight(name=name, parameter=tensor, entry=entry))
    return local


def bypass_layers(
    weights: Sequence[LocalWeight], *, first: int, bypassed: dict[str, torch.Tensor]
) -> None:
    """Zero what layers `first` and beyond add to the residual stream, so that the model computes
    only its first `first` layers. Layers before `first` that earlier calls bypassed are restored.
    `bypassed`: values of the zeroed weights by name, in host memory."""
    release_state()
    for weight in weights:
        is_bypassed = weight.entry.layer is not None and weight.entry.layer >= first
        adds = _ADDS_TO_RESIDUAL.search(weight.entry.megatron)
        if not adds and not _SCALES_RESIDUAL.search(weight.entry.megatron):
            continue
        if is_bypassed and weight.name not in bypassed:
            bypassed[weight.name] = weight.parameter.detach().to("cpu", copy=True)
            weight.parameter.data.fill_(0 if adds else 1)
        elif not is_bypassed and weight.name in bypassed:
            weight.parameter.data.copy_(bypassed.pop(weight.name))


def _mark_cut(parameter: torch.nn.Parameter, sharding: Sharding) -> None:
    """Mark a sharded parameter, as Megatron's gradient norm requires. Megatron does that in its
    initialisation, which is skipped here."""
    if sharding.axis != "none" and not hasattr(parameter, "tensor_model_parallel"):
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, sharding.dim, 1)


def _global_name(name: str, *, first_layer: int, first_expert: int) -> str:
    name = megatron_name(name)
    name = _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + first_layer}.", name)
    return _EXPERT.sub(lambda match: f".local_experts.{int(match[1]) + first_expert}.", name)


def cut(sharding: Sharding, mesh: Mesh) -> tuple[int, int]:
    """Return (number of parts, number of this rank's part) of a tensor."""
    if sharding.axis == "tp":
        return mesh.layout.tp, mesh.tp_rank
    if sharding.axis == "etp":
        return mesh.layout.etp, mesh.etp_rank
    return 1, 0


@torch.no_grad()
def load_hf(
    weights: Sequence[LocalWeight], table: WeightTable, *, folder: Path, mesh: Mesh
) -> None:
    """Load this rank's parameters, reading only its part of every tensor. Raises CheckpointError
    for missing or misshapen weights."""
    with open_source(folder) as reader:
        names = reader.names()
        on_disk = table.as_on_disk(names, reader.shape)
        if table.facts.trains_mtp:
            require_mtp_weights(on_disk, names, folder=str(folder))
        by_megatron = on_disk.by_megatron
        for weight in weights:
            entry = by_megatron[weight.entry.megatron]
            fused = entry.rule.fuse(_read_parts(reader, entry, mesh=mesh), entry.facts)
            assert fused.shape == weight.parameter.shape, (
                weight.name,
                fused.shape,
                weight.parameter.shape,
            )
            weight.parameter.copy_(fused)


def _read_parts(reader: Source, entry: Entry, *, mesh: Mesh) -> list[torch.Tensor]:
    """Return the parts of an entry as this rank holds them."""
    sharding = entry.rule.sharding
    count, number = cut(sharding, mesh)
    if entry.rule.unpack is None and not entry.rule.stacked:
        return [
            _read_part(reader, entry, index, count=count, number=number)
            for index in range(len(entry.hf))
        ]
    whole = [_read_disk(reader, entry, index) for index in range(len(entry.hf))]
    return [
        part.chunk(count, dim=sharding.dim)[number]
        for part in entry.rule.to_parts(whole, entry.facts)
    ]


def _read_disk(reader: Source, entry: Entry, index: int) -> torch.Tensor:
    """Return a whole disk tensor, or this expert's row of it."""
    name, shape = entry.hf[index], entry.shapes[index]
    if entry.row is None:
        _check_shape(reader, name, expected=shape)
        return reader.read(name)
    on_disk = reader.shape(name)
    if on_disk[1:] != shape or entry.row >= on_disk[0]:
        raise _misshapen(reader, name, on_disk=on_disk, expected=("experts", *shape))
    return reader.read_row(name, row=entry.row)


def _read_part(
    reader: Source, entry: Entry, index: int, *, count: int, number: int
) -> torch.Tensor:
    """Return part `number` of `count` of a disk tensor that is a part by itself."""
    name, whole, sharding = entry.hf[index], entry.shapes[index], entry.rule.sharding
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


def _check_shape(reader: Source, name: str, *, expected: tuple[int, ...]) -> None:
    if (on_disk := reader.shape(name)) != expected:
        raise _misshapen(reader, name, on_disk=on_disk, expected=expected)


def _misshapen(
    reader: Source, name: str, *, on_disk: tuple[int, ...], expected: tuple[object, ...]
) -> CheckpointError:
    return CheckpointError(
        f"`{reader.folder}`: weights and config.json do not match",
        why=f"`{name}` has shape {list(on_disk)} on disk, but {list(expected)} according to "
        "config.json",
        fix="download the model again",
    )
