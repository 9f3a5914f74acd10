"""Trajectories that no engine sampled: demonstrations to imitate."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from milescli.core.types import Trajectory


def demonstration(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Trajectory:
    """Every token of the response is on the loss mask; nobody has log-probs of them."""
    token_ids = array("i", [*prompt_ids, *response_ids])
    return Trajectory(
        token_ids=token_ids,
        loss_mask=bytes(len(prompt_ids)) + b"\1" * len(response_ids),
        logprobs=array("f", bytes(4 * len(token_ids))),
        version_spans=[],
    )
