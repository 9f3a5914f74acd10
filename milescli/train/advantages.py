"""From rewards to advantages, group by group. A new algorithm is one function here (or in a
plug-in) and one line in the table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from milescli.core.registry import Registry
from milescli.core.types import Group

NormalizeStd = Literal["group", "batch", "none"]

ALGORITHMS = Registry(
    "algorithm", {"grpo": "milescli.train.advantages:grpo"}, signature=("groups", "normalize_std")
)

STD_FLOOR = 1e-6
"""Added to a standard deviation before dividing by it."""


def compute(
    groups: Sequence[Group], *, algorithm: str, normalize_std: NormalizeStd
) -> list[list[float]]:
    """[groups][samples of the group] the advantage of every answer, which all its tokens share.

    Raises RecipeError where no algorithm has that name.
    """
    estimate = ALGORITHMS.resolve(algorithm, key="train.algorithm")
    assert callable(estimate), estimate
    advantages = estimate(groups=groups, normalize_std=normalize_std)
    sizes, expected = [len(row) for row in advantages], [len(group.samples) for group in groups]
    assert sizes == expected, f"{algorithm} gave {sizes} advantages for {expected} samples"
    return advantages


def grpo(*, groups: Sequence[Group], normalize_std: NormalizeStd) -> list[list[float]]:
    """A_i = (r_i - mean of the group) / std (GRPO, arXiv 2402.03300, section 4.1.2).

    std of the group, or of the whole batch's rewards (arXiv 2508.08221, section 4), or 1 (Dr. GRPO,
    arXiv 2503.20783). std is the sample standard deviation (n - 1); a single answer has none and
    gets 0.
    """
    batch_std = _std([reward for group in groups for reward in group.rewards])
    advantages = []
    for group in groups:
        mean = statistics.fmean(group.rewards)
        std = {"group": _std(group.rewards), "batch": batch_std, "none": 1.0}[normalize_std]
        scale = 1.0 if normalize_std == "none" else 1.0 / (std + STD_FLOOR)
        advantages.append([(reward - mean) * scale for reward in group.rewards])
    return advantages


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
