"""Advantages for a group that is judged by its best sample, or by how likely one is right."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from milescli.core.errors import RecipeError
from milescli.core.types import Group
from milescli.recipe.train import Train
from milescli.train.advantages.grpo import STD_FLOOR, std_of


def pass_at_k(*, groups: Sequence[Group], settings: Train) -> list[list[float]]:
    """Of pass@k, the chance that one of k = `pass_k` samples is right (Pass@k training, arXiv
    2508.10751). N: samples; W: wrong ones, reward 0 or less; C: binomials:

    p = 1 - C(W, k) / C(N, k), s = sqrt(p (1 - p)); a right sample gets (1 - p) / s, a wrong one
    (1 - p - C(W - 1, k - 1) / C(N - 1, k - 1)) / s; all get 0 where s is 0.
    """
    k, rows = settings.pass_k, []
    for group in groups:
        count = len(group.rewards)
        wrong = sum(reward <= 0 for reward in group.rewards)
        fails = math.comb(wrong, k) / math.comb(count, k) if count >= k else 1.0
        spread = math.sqrt(fails * (1.0 - fails))
        if not spread:
            rows.append([0.0] * count)
            continue
        beside_wrong = math.comb(wrong - 1, k - 1) / math.comb(count - 1, k - 1)
        right_value, wrong_value = fails / spread, (fails - beside_wrong) / spread
        rows.append([right_value if reward > 0 else wrong_value for reward in group.rewards])
    return rows


def best_of_n(*, groups: Sequence[Group], settings: Train) -> list[list[float]]:
    """The best sample of a group gets its lead over the second, divided by the std that
    `normalize_std` says; the others 0 (arXiv 2503.19595). The first of equals is the
    best; a single sample gets 0."""
    batch_std = std_of([reward for group in groups for reward in group.rewards])
    rows = []
    for group in groups:
        row = [0.0] * len(group.rewards)
        if len(row) > 1:
            best, second = sorted(group.rewards, reverse=True)[:2]
            stds = {"group": std_of(group.rewards), "batch": batch_std}
            scale = (
                stds[settings.normalize_std] + STD_FLOOR if settings.normalize_std in stds else 1
            )
            row[group.rewards.index(best)] = (best - second) / scale
        rows.append(row)
    return rows


def max_rl(*, groups: Sequence[Group], settings: Train) -> list[list[float]]:
    """A_i = (r_i - mean) / mean of the group (MaxRL, arXiv 2602.02710): the gradient of the
    likelihood of being right, so that hard prompts weigh more. 0 where the mean is 0."""
    rows = []
    for group in groups:
        if min(group.rewards) < 0:
            raise RecipeError(
                f"`max_rl` cannot take the reward {min(group.rewards):g}",
                why=f"prompt {group.prompt.index}: it divides by the mean reward as by a chance of "
                "being right, so rewards are 0 or more",
                fix="--set train.advantage=grpo",
            )
        mean = statistics.fmean(group.rewards)
        rows.append([(reward - mean) / mean if mean else 0.0 for reward in group.rewards])
    return rows
