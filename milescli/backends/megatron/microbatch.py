"""A microbatch on the device: one packed row with all that the model and the loss need of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from milescli.backends.megatron.layers.attention import PackedRow, pack_row
from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.rows import RowShape, make_row, take
from milescli.models.facts import ModelFacts
from milescli.train.base import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """S: positions of this rank, padding included; padding has loss weight 0 and is off the
    mask."""

    indices: list[int]
    """Sequences of the TrainBatch, in the order of the row."""
    source: torch.Tensor
    """[S] int64 on the host: position in the TrainBatch, -1 for padding."""
    row: PackedRow
    input_ids: torch.Tensor
    """[1, S] int64"""
    positions: torch.Tensor
    """[1, S] int64"""
    target_ids: torch.Tensor
    """[S] int64"""
    loss_mask: torch.Tensor
    """[S] bool"""
    loss_weights: torch.Tensor
    """[S] float32"""
    advantages: torch.Tensor
    """[S] float32"""
    engine_logprobs: torch.Tensor
    """[S] float32"""
    routed_experts: torch.Tensor | None
    """[S, num_layers, topk] int64; padding is routed to the first experts."""
    num_tokens: int
    """Real positions of the whole row."""


def row_shape(mesh: Mesh) -> RowShape:
    """What the layout asks of every row."""
    scattered = mesh.layout.sequence_parallel and mesh.layout.tp > 1
    return RowShape(
        cp=mesh.layout.cp, cp_rank=mesh.cp_rank, tail_multiple=mesh.layout.tp if scattered else 1
    )


def make_microbatch(
    batch: TrainBatch, indices: Sequence[int], *, mesh: Mesh, facts: ModelFacts
) -> Microbatch:
    """Sequences `indices` of the batch as this rank computes them."""
    shape, device = row_shape(mesh), mesh.device
    row = make_row(batch, indices, shape=shape)
    source = row.source

    def on_device(values: torch.Tensor, fill: float | int | bool) -> torch.Tensor:
        return take(values, source, fill=fill).to(device)

    routed = None
    if batch.routed_experts is not None:
        routed = take(batch.routed_experts, source, fill=0)
        routed[source < 0] = torch.arange(routed.shape[-1], dtype=routed.dtype)
        routed = routed.long().to(device)
    return Microbatch(
        indices=list(indices),
        source=source,
        row=pack_row(row, shape=shape, facts=facts, device=device),
        input_ids=on_device(batch.input_ids, 0)[None],
        positions=row.positions.to(device)[None],
        target_ids=on_device(batch.target_ids, 0),
        loss_mask=on_device(batch.loss_mask, False),
        loss_weights=on_device(batch.loss_weights, 0.0),
        advantages=on_device(batch.advantages, 0.0),
        engine_logprobs=on_device(batch.engine_logprobs, 0.0),
        routed_experts=routed,
        num_tokens=row.num_real,
    )
