"""Group-relative advantages."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from milescli.core.types import Group
from milescli.recipe.train import Train

STD_FLOOR = 1e-6
"""Added to a standard deviation before dividing by it."""


def grpo(*, groups: Sequence[Group], settings: Train) -> list[list[float]]:
    """A_i = (r_i - mean of the group) / std (GRPO, arXiv 2402.03300, section 4.1.2).

    std by `settings.normalize_std`: of the group, or of the whole batch's rewards (arXiv
    2508.08221, section 4), or 1 (Dr. GRPO, arXiv 2503.20783). It is the sample standard deviation
    (n - 1); a single sample has none and gets 0.
    """
    batch_std = std_of([reward for group in groups for reward in group.rewards])
    advantages = []
    for group in groups:
        mean = statistics.fmean(group.rewards)
        std = {"group": std_of(group.rewards), "batch": batch_std, "none": 1.0}[
            settings.normalize_std
        ]
        scale = 1.0 if settings.normalize_std == "none" else 1.0 / (std + STD_FLOOR)
        advantages.append([(reward - mean) * scale for reward in group.rewards])
    return advantages


def std_of(values: Sequence[float]) -> float:
    """The sample standard deviation; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
