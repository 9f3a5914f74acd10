"""Weights that come in pieces. Runs inside engine ranks, installed by the plug-in: an order of
`TensorChannel` names tensors and the boxes of them that lie in the memory of trainer ranks, and
the model's own loader copies from there what this engine rank holds, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from milescli.weights.shards import Box, Sharded, Source

SHARDS_FORMAT = "miles_shards"
"""`load_format` of such an order; its payload is [(JSON of `described`, handles of memory)]."""
FETCHED = "bytes fetched: "
"""How the reply starts; then the number of each engine rank."""


def install() -> None:
    """Let /update_weights_from_tensor understand SHARDS_FORMAT. Comes before other pieces that
    change the update: they shall see this one as any other."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.utils import MultiprocessingSerializer

    ordinary = WeightUpdater.update_weights_from_tensor

    def update(self, named_tensors, load_format=None):
        if load_format != SHARDS_FORMAT:
            return ordinary(self, named_tensors, load_format)
        ((order, handles),) = named_tensors
        flats = [MultiprocessingSerializer.deserialize(handle) for handle in handles]
        sources = sources_of(json.loads(order), flats)
        device = torch.device(self.device)
        failure = None
        try:
            ordinary(self, [(each.name, Sharded.of(each, device)) for each in sources])
        except Exception as error:  # would end the engine, without a word to the sender
            failure = f"{type(error).__name__}: {error}"
        return _answer(failure, sum(each.fetched * each.dtype.itemsize for each in sources))

    WeightUpdater.update_weights_from_tensor = update


def sources_of(order: Sequence[Any], flats: Sequence[torch.Tensor]) -> list[Source]:
    """Return the tensors of an order; `flats` ([bytes] uint8) are the memory of the senders."""
    return [
        Source(
            name,
            shape,
            (kind := getattr(torch, dtype)),
            [
                (
                    Box(start=tuple(start), shape=tuple(size)),
                    flats[sender][first:end].view(kind).view(size),
                )
                for sender, first, end, start, size in boxes
            ],
        )
        for name, shape, dtype, boxes in order
    ]


def _answer(failure: str | None, num_bytes: int) -> tuple[bool, str]:
    """What all ranks of the engine say: rank 0 alone replies."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    answers: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(answers, (failure, num_bytes), group=group.cpu_group)
    for rank, (failed, _) in enumerate(answers):
        if failed is not None:
            return False, f"engine rank {rank}: {failed}"
    return True, FETCHED + " ".join(str(each) for _, each in answers)
