"""Routing replay (R3): the trainer sends every token to the experts that the engine chose. Used
around each forward pass."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from milescli.backends.megatron.layers.experts import Router
from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.step.microbatch import Microbatch
from milescli.models.facts import ModelFacts

OwnRouters = list[tuple[int, Router]]
"""(layer of the model from 0, its router) of the layers of a rank that have experts."""


def own_routers(model: GPTModel, facts: ModelFacts) -> OwnRouters:
    """Return the routers in the order of the model; none if routing is not replayed. The engine's
    record has a place for each layer of the model, so layers without experts are counted too."""
    routers = []
    for layer in model.decoder.layers:
        router = getattr(getattr(layer, "mlp", None), "router", None)
        if router is not None and router.router_replay is not None:
            number = layer.layer_number - 1
            assert facts.is_moe_layer(number), (number, facts.family)
            routers.append((number, router))
    return routers


def prepare_forward(
    routers: OwnRouters, microbatch: Microbatch, *, mesh: Mesh, counts: bool
) -> None:
    """Set the recorded routes before a forward pass over a row. Under sequence parallelism the
    router of tp rank r sees the r-th part of it. `counts` also records what the routers would
    choose."""
    assert microbatch.routed_experts is not None
    own = microbatch.routed_experts.to(mesh.device).long()
    assert own.shape[1] == len(routers), (own.shape, len(routers))
    is_real = (microbatch.source >= 0).to(mesh.device)
    # padding goes to experts that differ, for a token's chosen ones always do
    first = torch.arange(own.shape[-1], device=mesh.device)
    own = torch.where(is_real[:, None, None], own, first)
    if mesh.layout.sequence_parallel and mesh.layout.tp > 1:
        own, is_real = (part.chunk(mesh.layout.tp)[mesh.tp_rank] for part in (own, is_real))
    for index, (_, router) in enumerate(routers):
        router.router_replay.set_target_indices(own[:, index].contiguous())
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        router.is_counted = is_real if counts else None


def after_forward(routers: OwnRouters, *, recomputes: bool) -> None:
    """Keep the choices for recomputation, whose backward pass uses them in the order of the forward
    passes; without recomputation drop them."""
    for _, router in routers:
        router.is_counted = None
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        if not recomputes:
            router.router_replay.clear_indices()


def finish(routers: OwnRouters) -> None:
    """Drop the choices and route freely again, after a pass over all microbatches."""
    for _, router in routers:
        router.router_replay.clear_indices()
        router.router_replay.clear_router_replay_action()


def share_of_changed_routes(routers: OwnRouters, mesh: Mesh) -> float | None:
    """Return the share of the replayed routes, counted since the last call, that the trainer's own
    routers would not have chosen; None if none were counted. Collective; equal on all ranks."""
    counts = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for _, router in routers:
        counts += router.route_counts
        router.route_counts.zero_()
    # tp ranks without sequence parallelism count the same routes, all of them
    dist.all_reduce(counts)
    differing, total = counts.tolist()
    return differing / total if total else None
