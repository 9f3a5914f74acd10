"""Credit of single turns: what an agent did where others of its group stood at the same place."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from milescli.core.types import Group, Trajectory
from milescli.recipe.train import Train
from milescli.train.advantages.grpo import STD_FLOOR, grpo, std_of

Place = tuple[int, int, int]
"""(sample, trajectory, turn)"""


def gigpo(*, groups: Sequence[Group], settings: Train) -> list[list[list[np.ndarray]]]:
    """A of a turn = GRPO's of its sample + `turn_weight` x its own (GiGPO, arXiv 2505.10978).

    A turn's own: its return gamma^(turns that follow) r, less the mean over the group's turns that
    answered the same observation, over their std unless `normalize_std` is none. An observation is
    the tokens between the turn before and this one; a turn that meets no other there gets 0."""
    episodes = grpo(groups=groups, settings=settings)
    return [_of_group(group, row, settings) for group, row in zip(groups, episodes, strict=True)]


def _of_group(group: Group, episode: Sequence[float], settings: Train) -> list[list[np.ndarray]]:
    turns = {
        (i, j): _turns(trajectory)
        for i, sample in enumerate(group.samples)
        for j, trajectory in enumerate(sample.trajectories)
    }
    returns: dict[Place, float] = {}
    meetings: defaultdict[bytes, list[Place]] = defaultdict(list)
    for (i, j), spans in turns.items():
        ids = np.frombuffer(group.samples[i].trajectories[j].token_ids, np.int32)
        before = 0
        for t, (begin, end) in enumerate(spans):
            returns[i, j, t] = settings.gamma ** (len(spans) - 1 - t) * group.rewards[i]
            meetings[ids[before:begin].tobytes()].append((i, j, t))
            before = end
    own = dict.fromkeys(returns, 0.0)
    for places in meetings.values():
        values = [returns[place] for place in places]
        if len(values) > 1:
            mean = statistics.fmean(values)
            scale = 1.0 if settings.normalize_std == "none" else std_of(values) + STD_FLOOR
            own.update(
                (place, (value - mean) / scale) for place, value in zip(places, values, strict=True)
            )
    made: list[list[np.ndarray]] = []
    for i, sample in enumerate(group.samples):
        rows = []
        for j, trajectory in enumerate(sample.trajectories):
            row = np.full(trajectory.num_tokens, episode[i], np.float32)
            for t, (begin, end) in enumerate(turns[i, j]):
                row[begin:end] += settings.turn_weight * own[i, j, t]
            rows.append(row)
        made.append(rows)
    return made


def _turns(trajectory: Trajectory) -> list[tuple[int, int]]:
    """[begin, end) of each run of tokens that the policy sampled."""
    mask = np.frombuffer(trajectory.loss_mask, np.int8)
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
