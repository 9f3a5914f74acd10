"""Builds trajectories that no engine sampled: rows and demonstrations to learn from."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from milescli.core.types import Trajectory

_TAIL = 4
"""Tokens that a template may write behind the end of a turn."""


def unsampled(token_ids: Sequence[int], loss_mask: bytes) -> Trajectory:
    """A line of tokens of which nobody has log-probs. `loss_mask`: [num_tokens] 1 where it is
    learned."""
    return Trajectory(
        token_ids=array("i", token_ids),
        loss_mask=loss_mask,
        logprobs=array("f", bytes(4 * len(token_ids))),
        version_spans=[],
    )


def demonstration(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Trajectory:
    """Every token of the response is on the loss mask."""
    mask = bytes(len(prompt_ids)) + b"\1" * len(response_ids)
    return unsampled([*prompt_ids, *response_ids], mask)


def cut(trajectory: Trajectory, num_tokens: int) -> Trajectory:
    """Keep the first `num_tokens` tokens."""
    if trajectory.num_tokens <= num_tokens:
        return trajectory
    return unsampled(trajectory.token_ids[:num_tokens], trajectory.loss_mask[:num_tokens])


def up_to_last(trajectory: Trajectory, token_id: int) -> Trajectory:
    """What stands behind the last `token_id` is left out, where it is learned and few."""
    ids = trajectory.token_ids
    for place in range(len(ids) - 1, max(len(ids) - 1 - _TAIL, 0), -1):
        if ids[place] == token_id and trajectory.loss_mask[place]:
            return cut(trajectory, place + 1)
    return trajectory
