"""The learning rate of a step. Pure; called by the loop."""

from __future__ import annotations

import math

from milescli.recipe.schema import Warmup
from milescli.recipe.train import Optimizer

LONG_FALL_STEPS = 100
"""From here on, start and end of a step of the warm-up's fall differ by less than 1 % of `lr`. The
start is kept there since runs of 400 steps are on record, and are to be repeated bit for bit."""


def lr_at(optimizer: Optimizer, step: int, total_steps: int) -> float:
    """Learning rate of step `step` (the first is 0) of `total_steps`.

    During `warmup_steps` it rises linearly and reaches `lr` on the last of them; then it stays, or
    falls to `min_lr` on the last step: linearly, or along half a cosine (SGDR, arXiv 1608.03983,
    eq. 5).
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.lr
    last = max(total_steps - 1 - optimizer.warmup_steps, 1)
    progress = min((step - optimizer.warmup_steps) / last, 1.0)
    left = (
        1.0 - progress
        if optimizer.schedule == "linear"
        else (1.0 + math.cos(math.pi * progress)) / 2
    )
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * left


def warmup_lr_at(warmup: Warmup, step: int) -> float:
    """Learning rate of supervised step `step` (the first is 0): up over the first tenth, then `lr`,
    and over the last third straight down to a tenth of it, so that RL begins from a settled model.

    A step takes the rate of its end, so that the last one of two or more is at a tenth. In a fall
    of `LONG_FALL_STEPS` or more it takes that of its start, and the last one is 1 % above at most.
    """
    rise, fall = max(1, warmup.steps // 10), max(1, warmup.steps // 3)
    if step < rise:
        return warmup.lr * (step + 1) / rise
    num_left = warmup.steps - step - (fall < LONG_FALL_STEPS)
    return warmup.lr * (0.1 + 0.9 * min(1.0, num_left / fall))
