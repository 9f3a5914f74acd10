"""Defines a microbatch on the device: one packed row with the model's inputs, and the place of each
token in the shard (`shard.py`), which holds the streams."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from milescli.backends.megatron.layers.attention import PackedRow
from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.step.images import RowImages
from milescli.backends.megatron.step.rows import RowShape
from milescli.train.packed_tokens import Places


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowingTokens:
    """Holds the tokens after the targets of a row."""

    ids: torch.Tensor
    """[S] int64; 0 if the sequence ends before."""
    mask: torch.Tensor
    """[S] bool; True if there is such a token, and it is on the loss mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Holds one packed row. S: positions of this rank, padding included; padding is off the mask
    and has weight 0."""

    indices: list[int]
    """Sequences of the shard, in the order of the row."""
    source: torch.Tensor
    """[S] int64 on the host: index of the input token in the shard, -1 for padding. The token after
    it is predicted."""
    row: PackedRow
    input_ids: torch.Tensor
    """[1, S] int64"""
    positions: torch.Tensor
    """[1, S] int64"""
    target_ids: torch.Tensor
    """[S] int64"""
    after: FollowingTokens | None
    """The tokens after the targets, if an MTP layer is trained."""
    places: Places
    loss_mask: torch.Tensor
    """[S] bool"""
    loss_weights: torch.Tensor
    """[S] float32"""
    routed_experts: torch.Tensor | None
    """[S, this rank's layers with experts, topk] on the host, of the shard's dtype; values at
    padding have no meaning."""
    num_tokens: int
    """Number of real positions of this rank; positions that sequences share count for each."""
    images: RowImages | None = None
    """On ranks that hold a vision tower."""


def row_shape(mesh: Mesh) -> RowShape:
    """Return the layout's requirements on every row."""
    scattered = mesh.layout.sequence_parallel and mesh.layout.tp > 1
    return RowShape(
        cp=mesh.layout.cp,
        cp_rank=mesh.cp_rank,
        tail_multiple=mesh.layout.tp if scattered else 1,
    )
