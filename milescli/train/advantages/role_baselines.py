"""Role-conditioned advantages: a moving average of the reward of each role as its baseline, which
lasts from step to step. Called as `train.advantage: rae`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from milescli.core.types import Group
from milescli.recipe.train import Train
from milescli.train.advantages import NO_STATE


def rae(
    *, groups: Sequence[Group], settings: Train, state: Mapping[str, float] = NO_STATE
) -> list[list[float | list[float]]]:
    """A = R - b, b = `baseline_decay` b + (1 - `baseline_decay`) R first, one b for each role and
    game, 0 at first (role-conditioned advantage estimation of SPIRAL, arXiv 2506.24119, section
    3.3). R: the role's reward if it has its own, else the sample's. Samples update b in their
    order. A game is an entry of `data.mix`. A role whose tokens are not trained updates no b."""
    rows: list[list[float | list[float]]] = []
    walk = _update_baselines(groups, settings, dict(state))
    for group in groups:
        row: list[float | list[float]] = []
        for sample in group.samples:
            values = next(walk)
            is_one = len({line.role for line in sample.trajectories}) < 2
            row.append(values[0] if is_one else values)
        rows.append(row)
    return rows


def _next_state(
    *, groups: Sequence[Group], settings: Train, state: Mapping[str, float]
) -> dict[str, float]:
    baselines = dict(state)
    for _ in _update_baselines(groups, settings, baselines):
        pass
    return baselines


rae.next_state = _next_state  # type: ignore[attr-defined]


def _update_baselines(
    groups: Sequence[Group], settings: Train, baselines: dict[str, float]
) -> Iterator[list[float]]:
    """Yield the advantages [trajectories] of each sample, and update the baselines."""
    decay = settings.baseline_decay
    for group in groups:
        for sample in group.samples:
            assert sample.reward is not None, f"prompt {group.prompt.index} is not scored"
            own = dict[str | None, float]()
            for line in sample.trajectories:
                if line.role in own or not line.num_loss_tokens:
                    continue
                reward = sample.role_rewards.get(line.role or "", sample.reward)
                name = json.dumps([group.prompt.source, line.role])
                baselines[name] = decay * baselines.get(name, 0.0) + (1.0 - decay) * reward
                own[line.role] = reward - baselines[name]
            yield [own.get(line.role, 0.0) for line in sample.trajectories] or [0.0]
