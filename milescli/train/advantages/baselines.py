"""A reward less a baseline: what differs is what the baseline is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from milescli.core.types import Group
from milescli.recipe.train import Train


def reinforce(*, groups: Sequence[Group], settings: Train) -> list[list[float]]:
    """A_i = r_i (REINFORCE, Williams 1992; REINFORCE++, arXiv 2501.03262, whitens it later)."""
    return [list(group.rewards) for group in groups]


def rloo(*, groups: Sequence[Group], settings: Train) -> list[list[float]]:
    """A_i = r_i - mean of the other rewards of the group (RLOO, arXiv 2402.14740, section 3.3). A
    single sample gets its reward."""
    return [
        [reward - _mean_of_others(group, reward) for reward in group.rewards] for group in groups
    ]


def opo(*, groups: Sequence[Group], settings: Train) -> list[list[float]]:
    """A_i = r_i - mean of the group, each reward weighted by its response's trained tokens (OPO,
    arXiv 2505.23585): the baseline of least variance where a token's gradients are alike. A
    single sample gets its reward."""
    rows = []
    for group in groups:
        lengths = [sample.num_loss_tokens for sample in group.samples]
        weighted = sum(n * reward for n, reward in zip(lengths, group.rewards, strict=True))
        baseline = weighted / sum(lengths) if len(lengths) > 1 and sum(lengths) else 0.0
        rows.append([reward - baseline for reward in group.rewards])
    return rows


def remax(*, groups: Sequence[Group], settings: Train) -> list[list[float]]:
    """A_i = r_i - reward of the greedy response to the same prompt (ReMax, arXiv 2310.10505),
    which the collector samples beside the others."""
    rows = []
    for group in groups:
        assert group.greedy_reward is not None, (
            f"prompt {group.prompt.index} has no greedy response"
        )
        rows.append([reward - group.greedy_reward for reward in group.rewards])
    return rows


remax.needs_greedy = True  # type: ignore[attr-defined]


def gpg(*, groups: Sequence[Group], settings: Train) -> list[list[float]]:
    """A_i = alpha (r_i - mean of the group); alpha = samples / samples of groups whose rewards
    differ (GPG, arXiv 2504.02546): groups that teach nothing do not water the others down."""
    total = sum(len(group.samples) for group in groups)
    telling = sum(len(group.samples) for group in groups if len(set(group.rewards)) > 1)
    alpha = total / max(telling, 1)
    means = [statistics.fmean(group.rewards) for group in groups]
    return [
        [alpha * (reward - mean) for reward in group.rewards]
        for group, mean in zip(groups, means, strict=True)
    ]


def _mean_of_others(group: Group, reward: float) -> float:
    others = len(group.rewards) - 1
    return (sum(group.rewards) - reward) / others if others else 0.0
