"""Trajectories as sequences to learn from: the same arrays, seen as numpy. No copy, no policy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from milescli.core.types import Trajectory
from milescli.train.base import TrainSequence

_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.int32}
"""By bytes of an expert's number, as `RoutedExperts.bytes_per_number` says."""


def sequence_of(
    trajectory: Trajectory,
    *,
    streams: Mapping[str, np.ndarray],
    token_weight: float,
    share: float,
    group: int,
) -> TrainSequence:
    """All of `TrainSequence`, with the trajectory's tokens, mask and expert choices."""
    return TrainSequence(
        token_ids=np.frombuffer(trajectory.token_ids, np.int32),
        loss_mask=np.frombuffer(trajectory.loss_mask, np.bool_),
        streams=streams,
        token_weight=token_weight,
        share=share,
        group=group,
        routed_experts=_routing(trajectory),
    )


def _routing(trajectory: Trajectory) -> np.ndarray | None:
    """[num_tokens - 1, num_layers, topk] as the engine sent it, where it kept a record."""
    routed = trajectory.routed_experts
    if routed is None:
        return None
    rows = (routed.num_tokens, trajectory.num_tokens)
    assert routed.num_tokens == trajectory.num_tokens - 1, rows
    shape = (routed.num_tokens, routed.num_layers, routed.topk)
    return np.frombuffer(routed.indices, _DTYPES[routed.bytes_per_number]).reshape(shape)
