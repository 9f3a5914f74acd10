"""What replayed routing does to scores: a case that `world` calls."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tests.backends.megatron.harness import policy_shard, scores_everywhere, trainer

if TYPE_CHECKING:
    from milescli.backends.megatron.worker import TrainerRank
    from milescli.train.base import TrainShard

ROUNDING = 2**-8
"""Of bfloat16, relative."""


def routing_effect(*, rank: int, size: int, port: int, model: str, layout: dict) -> dict:
    """Scores of one batch routed freely, as the model would route by itself (recorded), and by
    random choices; then, with every weight moved by a rounding, freely and as it was recorded."""
    made = trainer(
        rank=rank, size=size, port=port, model=model, layout=layout, train={"routing_replay": True}
    )
    facts = made.facts
    shard = policy_shard(made, 1, routing=(facts.num_experts, facts.num_layers, facts.topk))
    free = replace(shard, routed_experts=None)
    own = replace(shard, routed_experts=_recorded(made, shard))
    scores = {
        name: scores_everywhere(made, routed)
        for name, routed in {"free": free, "own": own, "random": shard}.items()
    }
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.policy.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.mul_(1 + ROUNDING * noise)
    scores |= {
        "moved free": scores_everywhere(made, free),
        "moved own": scores_everywhere(made, own),
    }
    made.close()
    return {name: [x for row in rows for x in row] for name, rows in scores.items()}


def _recorded(made: TrainerRank, shard: TrainShard) -> np.ndarray:
    """What the model's own routers choose, as an engine's record: a place for every layer, and
    what stands for layers without experts means nothing."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from milescli.backends.megatron.step.shard import RankShard

    passes = made.policy.passes
    rows = np.full_like(shard.routed_experts, 255)
    free = replace(shard, routed_experts=None)
    for microbatch in RankShard(free, mesh=made.mesh, facts=made.facts).microbatches:
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        routers, passes.routers = passes.routers, []
        passes.score([microbatch], temperature=shard.temperature)
        passes.routers = routers
        is_real = microbatch.source.numpy() >= 0
        for layer, router in routers:
            chosen = router.router_replay.get_recorded_indices().numpy()
            rows[microbatch.source.numpy()[is_real], layer] = chosen[is_real]
        RouterReplay.clear_global_router_replay_action()
    return rows
