"""Bytes that a trainer rank holds between steps: weights, gradients, optimizer. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from milescli.plan.parameters import Held
from milescli.plan.types import TrainerLayout

if TYPE_CHECKING:
    from milescli.plan.memory import TrainerLoad

_PAD = 128
"""Megatron pads flat memory to a multiple of this and of the ranks that share it."""


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
