"""Credit of single turns: what an agent did where others of its group stood at the same place."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from milescli.core.types import Group, Sample, Trajectory
from milescli.recipe.train import Train
from milescli.train.advantages.grpo import STD_FLOOR, grpo, std_of

Place = tuple[int, int, int]
"""(sample, trajectory, turn)"""


def turns(*, groups: Sequence[Group], settings: Train) -> list[list[list[np.ndarray]]]:
    """A of turn t = (G_t - mean) / std over the group's samples that have a turn t; G_t = sum over
    its turns j >= t of gamma^(j - t) r_j: a turn is held against what others got from the same
    turn on, and not credited with what was got before it (GRPO, arXiv 2402.03300, turn by turn, as
    process rewards in its section 4.1.3). r: the rewards of turns; what the sample's reward is
    beyond their sum is the last turn's. std by `settings.normalize_std`; a turn that no other
    sample has gets 0."""
    rows = [[returns_of(each, gamma=settings.gamma) for each in group.samples] for group in groups]
    batch_std = std_of([value for row in rows for sample in row for value in sample.values()])
    return [
        [
            _spread(sample, own)
            for sample, own in zip(group.samples, _compared(row, batch_std, settings), strict=True)
        ]
        for group, row in zip(groups, rows, strict=True)
    ]


def returns_of(sample: Sample, *, gamma: float) -> dict[tuple[int, int], float]:
    """By (trajectory, turn): what came from that turn on, in its trajectory. What the sample's
    reward is beyond the rewards of turns comes at the end of each trajectory."""
    rewards = [
        [_sum_of(trajectory, span) for span in _turns(trajectory)]
        for trajectory in sample.trajectories
    ]
    rest = (sample.reward or 0.0) - sum(map(sum, rewards))
    made = dict[tuple[int, int], float]()
    for index, row in enumerate(rewards):
        following = rest
        for turn in reversed(range(len(row))):
            is_last = turn == len(row) - 1
            following = row[turn] + (following if is_last else gamma * following)
            made[index, turn] = following
    return made


def _sum_of(trajectory: Trajectory, span: tuple[int, int]) -> float:
    rewards = trajectory.rewards
    return float(sum(rewards[span[0] : span[1]])) if rewards is not None else 0.0


def _compared(
    row: Sequence[dict[tuple[int, int], float]], batch_std: float, settings: Train
) -> list[dict[tuple[int, int], float]]:
    """Of each sample of a group, by place."""
    meetings: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for sample in row:
        for place, value in sample.items():
            meetings[place].append(value)

    def scale(values: Sequence[float]) -> float:
        stds = {"group": std_of(values), "batch": batch_std}
        std = stds.get(settings.normalize_std)
        return 1.0 if std is None else 1.0 / (std + STD_FLOOR)

    scales = {place: scale(values) for place, values in meetings.items()}
    means = {place: statistics.fmean(values) for place, values in meetings.items()}
    return [
        {place: (value - means[place]) * scales[place] for place, value in sample.items()}
        for sample in row
    ]


def _spread(sample: Sample, own: dict[tuple[int, int], float]) -> list[np.ndarray]:
    made = []
    for index, trajectory in enumerate(sample.trajectories):
        row = np.zeros(trajectory.num_tokens, np.float32)
        for turn, (begin, end) in enumerate(_turns(trajectory)):
            row[begin:end] = own[index, turn]
        made.append(row)
    return made


def gigpo(*, groups: Sequence[Group], settings: Train) -> list[list[list[np.ndarray]]]:
    """A of a turn = GRPO's of its sample + `turn_weight` x its own (GiGPO, arXiv 2505.10978).

    A turn's own: its return (`returns_of`), less the mean over the group's turns that answered the
    same observation, over their std unless `normalize_std` is none. An observation is the tokens
    between the turn before and this one; a turn that meets no other there gets 0."""
    episodes = grpo(groups=groups, settings=settings)
    return [_of_group(group, row, settings) for group, row in zip(groups, episodes, strict=True)]


def _of_group(group: Group, episode: Sequence[float], settings: Train) -> list[list[np.ndarray]]:
    turns = {
        (i, j): _turns(trajectory)
        for i, sample in enumerate(group.samples)
        for j, trajectory in enumerate(sample.trajectories)
    }
    returns: dict[Place, float] = {
        (i, j, t): value
        for i, sample in enumerate(group.samples)
        for (j, t), value in returns_of(sample, gamma=settings.gamma).items()
    }
    meetings: defaultdict[bytes, list[Place]] = defaultdict(list)
    for (i, j), spans in turns.items():
        ids = np.frombuffer(group.samples[i].trajectories[j].token_ids, np.int32)
        before = 0
        for t, (begin, end) in enumerate(spans):
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
