"""Bytes that a trainer rank holds between steps: weights, gradients, optimizer; and what memory
depends on beside model and layout. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from milescli.models.facts import ModelFacts
from milescli.plan.activations import Packing
from milescli.plan.measured import Reached
from milescli.plan.parameters import Held
from milescli.plan.types import TrainerLayout

_PAD = 128
"""Megatron pads flat memory to a multiple of this and of the ranks that share it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLoad:
    """What memory depends on, beside model and layout."""

    size: int
    """Bytes of a weight: 2 (bf16) or 4 (fp32)."""
    row_tokens: int
    """Of the longest row on one rank: the microbatch cap."""
    num_microbatches: int
    """Of one rank in one update."""
    keeps_reference: bool
    critic: Literal["none", "in_turn", "beside"]
    """in_turn: of critic and policy one waits in host memory; beside: both stand in main memory."""
    teachers: tuple[ModelFacts, ...] = ()
    """Of the models that the ranks hold beside the policy and do not train."""
    teachers_beside: bool = False
    """They stand in main memory with the policy; else in turn, as the critic."""
    takes_copies: bool = False
    """Of its state (`fault.copy_every`)."""
    saves_copy: bool = False
    """Copies its state to host memory, whence a checkpoint is written (`checkpoint.async_save`). On
    a CPU a checkpoint is written from where the state is."""
    sleeps: bool
    """Goes to host memory while the engines generate."""
    bucket_bytes: int
    """Of weight sync."""
    packing: Packing = field(default_factory=Packing)
    on_host: bool = False
    """The device is a CPU."""
    fused_swiglu: bool = False
    """See `activations.layer_bytes`; of float32 on a CPU."""
    reached: Reached = field(default_factory=Reached)


def frozen_bytes(held: Held, *, size: int) -> int:
    """Of weights that are not trained."""
    return held.total * size + held.wide.plain * (4 - size)


def saved_bytes(held: Held, layout: TrainerLayout, *, size: int) -> int:
    """Of what one rank's part of a checkpoint is copied from a device: the optimizer's states, and
    the weights whose states the rank has."""
    shards, expert_shards = layout.dp * layout.cp, layout.expert_dp
    weights = held.dense.plain / shards + held.experts.plain / expert_shards
    wide = 4 * held.wide.plain / shards
    return static_bytes(held, layout, size=size)[2] + int(weights * size + wide)


def static_bytes(held: Held, layout: TrainerLayout, *, size: int) -> tuple[int, int, int]:
    """(weights, gradients, optimizer) on the device, as `backends.megatron.optimizer` has Megatron
    allocate them: gradients in float32; Adam's two moments in float32, and float32 weights beside
    bfloat16 ones, spread over the data- and context-parallel ranks, those of experts over the ranks
    that hold the same experts (ZeRO stage 1: Rajbhandari et al., arXiv 1910.02054, section 5.1)."""
    shards, expert_shards = layout.dp * layout.cp, layout.expert_dp
    dense, wide = _padded(held.dense.aligned, shards), _padded(held.wide.aligned, shards)
    experts = _padded(held.experts.aligned, expert_shards)
    weights = (dense + experts + held.frozen.plain) * size + 4 * wide
    gradients = 4 * (dense + experts + wide)
    copies, moments = (0 if size == 4 else 4), 8
    shared = held.dense.plain / shards + held.experts.plain / expert_shards
    optimizer = (
        0.0
        if layout.offload_optimizer
        else (copies + moments) * shared + moments * held.wide.plain / shards
    )
    return weights, gradients, int(optimizer)


def host_bytes(
    held: Held, layout: TrainerLayout, load: TrainerLoad, static: tuple[int, int, int]
) -> int:
    """Of the node's main memory: optimizer states that are offloaded, and what a sleeping rank or a
    reference keeps there. `static`: what `static_bytes` says of the model."""
    host = 0
    if load.keeps_reference:
        # the frozen weights; beside a device the current ones too, while those take their place
        host += (2 - load.teachers_beside) * held.total * load.size
    if load.critic == "beside":
        host += sum(static)
    elif load.critic == "in_turn":
        host += static[0] + static[2]
    if load.sleeps or (load.teachers and not load.teachers_beside):
        host += static[0] + static[2]
    if layout.offload_optimizer:
        host += static_bytes(held, replace(layout, offload_optimizer=False), size=load.size)[2]
    return host


def _padded(numbers: int, shards: int) -> int:
    unit = math.lcm(_PAD, shards)
    return -(-numbers // unit) * unit
