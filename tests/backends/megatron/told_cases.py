"""What a step tells of single sequences, beside what `score` says of them before it. Called by
`world.py` through `cases`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from milescli.backends.megatron.worker import TrainerRank
from milescli.train.base import TrainShard
from tests.backends.megatron.harness import everywhere, policy_shard, scores_everywhere, trainer

TOLD: dict[str, dict[str, dict[str, Any]]] = {
    "two": {
        "told dp2": {"layout": {"dp": 2}, "updates": 2, "old": "engine"},
        "told cp2": {"layout": {"cp": 2}, "updates": 2, "old": "trainer"},
        "told tp2": {"layout": {"tp": 2, "sequence_parallel": True}, "updates": 1, "old": "engine"},
    },
    "four": {
        "told cp2 pp2": {"layout": {"cp": 2, "pp": 2}, "updates": 2, "old": "engine"},
    },
}
"""By world and name. `old`: with the engine's log-probs as the old ones, no rank scores anything
before the first update."""


def told_cases(which: str, *, model: str) -> list[dict[str, Any]]:
    """Of a world."""
    cases = TOLD.get(which, {}).items()
    return [{"name": name, "call": "told_by_a_step", "model": model, **how} for name, how in cases]


def told_by_a_step(
    *, rank: int, size: int, port: int, model: str, layout: dict, updates: int, old: str
) -> dict[str, Any]:
    """Of every second sequence: which were told, which a first update reads, and how far what was
    told is from the scores before."""
    train = {"old_logprobs": old, "updates_per_step": updates}
    made = trainer(rank=rank, size=size, port=port, model=model, layout=layout, train=train)
    shard = policy_shard(made, 0, updates=updates)
    logprob_ids = tuple(i for i, number in enumerate(shard.sequence_ids) if number % 2 == 0)
    before = scores_everywhere(made, shard)
    checked = _checked(made, shard, before)
    stepped = made.step(replace(shard, logprob_ids=logprob_ids), 1e-1)
    first = {int(shard.sequence_ids[i]) for microbatch in shard.updates[0] for i in microbatch}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (dict(stepped.logprobs), first))
    after = scores_everywhere(made, shard)
    made.close()
    told = {number: values for own, _ in gathered for number, values in own.items()}

    def furthest(scores: list[list[float]]) -> list[float]:
        """Of each sequence, on its loss mask; elsewhere nothing is told."""
        return [
            np.abs(values - np.array(scores[number]))[values != 0.0].max()
            for number, values in told.items()
            if values.any()
        ]

    gaps, moved = furthest(before), furthest(after)
    return {
        "told": sorted(told),
        "speakers": sum(bool(own) for own, _ in gathered),
        "first": sorted(set().union(*(first for _, first in gathered))),
        "num_sequences": len(before),
        "checked": checked,
        "gap": float(max(gaps)),
        "moved": float(min(moved)),
    }


def _checked(
    made: TrainerRank, shard: TrainShard, before: list[list[float]]
) -> dict[str, float | bool]:
    """What the start check asks of ranks: scores that are rounded otherwise, twice, and those of
    fewer layers, which come back."""

    def rounded() -> list[np.ndarray]:
        return everywhere(made, lambda own: made.score(own, with_other_rounding=True), shard)

    plain = np.concatenate([np.array(row) for row in before])
    first, again = (np.concatenate(rounded()) for _ in range(2))
    made.bypass_layers(0)
    silent = np.concatenate([np.array(row) for row in scores_everywhere(made, shard)])
    made.bypass_layers(made.facts.num_layers)
    return {
        "rounded": float(np.abs(first - plain).max()),
        "is_repeated": bool(np.array_equal(first, again)),
        "silent": float(np.abs(silent - plain).max()),
        "is_restored": scores_everywhere(made, shard) == before,
    }
