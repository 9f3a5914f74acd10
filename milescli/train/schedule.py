"""The learning rate of a step. Pure; called by the loop."""

from __future__ import annotations

import math

from milescli.recipe.schema import Optimizer


def lr_at(optimizer: Optimizer, step: int, total_steps: int) -> float:
    """Learning rate of step `step` (the first is 0) of `total_steps`.

    During `warmup_steps` it rises linearly and reaches `lr` on the last of them; then it stays, or falls to `min_lr` on the
    last step: linearly, or along half a cosine (SGDR, arXiv 1608.03983, eq. 5).
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.lr
    last = max(total_steps - 1 - optimizer.warmup_steps, 1)
    progress = min((step - optimizer.warmup_steps) / last, 1.0)
    left = 1.0 - progress if optimizer.schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * left
