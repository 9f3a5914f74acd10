"""R3, routing replay: the trainer sends every token to the experts that the engine chose. Used
around each forward pass."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from milescli.backends.megatron.mesh import Mesh


def own_routers(model: GPTModel) -> list[tuple[int, RouterReplay]]:
    """(layer from 0, its replay instance) of every layer of this rank that has experts, in the
    order of the model."""
    routers = []
    for layer in model.decoder.layers:
        replay = getattr(
            getattr(getattr(layer, "mlp", None), "router", None), "router_replay", None
        )
        if replay is not None:
            routers.append((layer.layer_number - 1, replay))
    return routers


def prepare_forward(
    routers: list[tuple[int, RouterReplay]], routed_experts: torch.Tensor, *, mesh: Mesh
) -> None:
    """Before a forward pass over a row: `routed_experts` [S, num_layers, topk] as this
    context-parallel rank holds the row. Under sequence parallelism the router of tp rank r sees the
    r-th part of it."""
    if mesh.layout.sequence_parallel and mesh.layout.tp > 1:
        routed_experts = routed_experts.chunk(mesh.layout.tp, dim=0)[mesh.tp_rank]
    for layer, router in routers:
        router.set_target_indices(routed_experts[:, layer].contiguous())
        router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def after_forward(routers: list[tuple[int, RouterReplay]]) -> None:
    """Recomputation in the backward pass takes the choices in the order of the forward passes."""
    for _, router in routers:
        router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)


def finish(routers: list[tuple[int, RouterReplay]]) -> None:
    """After a pass over all microbatches: forget the choices, route freely again."""
    for _, router in routers:
        router.clear_indices()
        router.clear_router_replay_action()
