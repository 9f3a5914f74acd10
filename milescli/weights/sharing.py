"""Says which trainer ranks share memory with an engine, for the tensor channel. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from milescli.plan.types import Slot


def sharing_ranks(slots: Sequence[Slot], engine: int, *, on_cpu: bool) -> list[int]:
    """Return [tp] the trainer rank for each rank of the engine: the one on its own device; on a CPU
    the first on its node, so that each node holds one copy of a bucket. Returns an empty list if an
    engine rank has none: its weights must come through a group."""
    shards = sorted(
        (slot for slot in slots if slot.engine == engine), key=lambda slot: slot.engine_rank or 0
    )
    if on_cpu:
        first: dict[int, int] = {}
        for slot in slots:
            if slot.trainer_rank is not None:
                first[slot.node] = min(slot.trainer_rank, first.get(slot.node, slot.trainer_rank))
        owners = [first.get(shard.node) for shard in shards]
    else:
        owners = [shard.trainer_rank for shard in shards]
    ranks = [rank for rank in owners if rank is not None]
    return ranks if len(ranks) == len(shards) else []
