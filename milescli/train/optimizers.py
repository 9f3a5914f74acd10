"""Loads update rules, which change one weight, and learning-rate schedules. `train.optimizer.rule`
and `train.optimizer.schedule` name them: built in here, an entry point, or an import path. A rule
sees flat parts of weights, different on each rank, so it must work element by element; a matrix
rule also gets whole matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from milescli.core.errors import RecipeError
from milescli.core.plug_points import SCHEDULES
from milescli.core.user_code import plugin_fix
from milescli.platform.lazy import torch
from milescli.recipe.schema import Warmup
from milescli.recipe.train import Optimizer
from milescli.workers.isolated import resolve_isolated

ADAMW = "adamw"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamStep:
    """Holds the settings of one AdamW step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    """Decoupled from the gradient."""
    clip_grad: float
    """Largest global L2 norm of the gradients; 0.0: they are not clipped."""


class UpdateRule(Protocol):
    """Defines a plug-in of `train.optimizer.rule`. Ranks call it at each step, for each part of a
    weight."""

    def __call__(
        self,
        *,
        weight: torch.Tensor,
        grad: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        step: int,
        lr: float,
        weight_decay: float,
        settings: Optimizer,
    ) -> None:
        """Change `weight` [n] in place. `first`, `second` [n] float32: state of the rule, zeros at
        first, saved with the weights; `step`: from 1; `weight_decay`: 0 for gains and biases."""
        ...


class MatrixRule(UpdateRule, Protocol):
    """Defines an update rule that needs whole matrices of the model's layers: those that Hugging
    Face checkpoints store, one per expert. Embeddings, the output layer, gains and biases are
    updated by calling the rule itself, element by element."""

    def momentum(
        self, *, grad: torch.Tensor, first: torch.Tensor, settings: Optimizer
    ) -> torch.Tensor:
        """Return [n] float32, the input of `direction` for a part of a matrix, element by element.
        May change `first` in place."""
        ...

    def direction(self, *, matrix: torch.Tensor) -> torch.Tensor:
        """Return [rows, columns] float32, the direction for the whole matrix of momenta: it is
        multiplied by the learning rate and subtracted, after the decoupled weight decay. Changes
        nothing."""
        ...


def takes_matrices(rule: UpdateRule) -> TypeGuard[MatrixRule]:
    """Return True if the rule is a `MatrixRule`."""
    return hasattr(rule, "momentum") and hasattr(rule, "direction")


LONG_DECAY_STEPS = 100
"""For a decay with at least this many steps, the start and end of a step differ by less than 1 % of
`lr`. Such decays use the start, because existing runs of 400 steps must stay reproducible bit for
bit."""


class Schedule(Protocol):
    """Defines a plug-in of `train.optimizer.schedule`."""

    def __call__(self, *, progress: float, settings: Optimizer) -> float:
        """Return the learning rate. `progress`: the share of the steps after the warm-up that are
        done, 0.0 at the first of them and below 1.0 at the last, so that no step has a rate of
        zero."""
        ...


def lr_at(optimizer: Optimizer, step: int, total_steps: int) -> float:
    """Return the learning rate of step `step` (the first is 0) of `total_steps`.

    During `warmup_steps` it rises linearly and reaches `lr` on the last of them; then the schedule
    decides. Raises RecipeError if the schedule returns no valid rate.
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    num_steps = max(total_steps - optimizer.warmup_steps, 1)
    progress = min((step - optimizer.warmup_steps) / num_steps, 1.0)
    rate = resolve_isolated(SCHEDULES, optimizer.schedule)(progress=progress, settings=optimizer)
    if isinstance(rate, int | float) and math.isfinite(rate) and rate >= 0:
        return float(rate)
    raise RecipeError(
        f"the schedule `{optimizer.schedule}` returned {rate!r}",
        why=f"for step {step + 1} of {total_steps}; a learning rate must be a number of at least 0",
        fix=plugin_fix(optimizer.schedule),
    )


def constant(*, progress: float, settings: Optimizer) -> float:
    """Return `lr` throughout."""
    return settings.lr


def linear(*, progress: float, settings: Optimizer) -> float:
    """Return a rate that decays linearly to `min_lr`, which the step after the last would have."""
    return settings.min_lr + (settings.lr - settings.min_lr) * (1.0 - progress)


def cosine(*, progress: float, settings: Optimizer) -> float:
    """Return a rate that decays to `min_lr` along half a cosine (SGDR, arXiv 1608.03983, eq. 5)."""
    left = (1.0 + math.cos(math.pi * progress)) / 2
    return settings.min_lr + (settings.lr - settings.min_lr) * left


def warmup_lr_at(warmup: Warmup, step: int) -> float:
    """Return the learning rate of supervised step `step` (the first is 0): it rises over the first
    tenth, stays at `lr`, and falls linearly to a tenth over the last third, so that RL begins from
    a settled model. A step takes the rate of its end, so that the last one of two or more is at a
    tenth. In a decay of `LONG_DECAY_STEPS` or more it takes the rate of its start, and the last one
    is at most 1 % above."""
    rise, fall = max(1, warmup.steps // 10), max(1, warmup.steps // 3)
    if step < rise:
        return warmup.lr * (step + 1) / rise
    num_left = warmup.steps - step - (fall < LONG_DECAY_STEPS)
    return warmup.lr * (0.1 + 0.9 * min(1.0, num_left / fall))


# --- rules: what a step does to a weight


def adamw(
    *,
    weight: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    step: int,
    lr: float,
    weight_decay: float,
    settings: Optimizer,
) -> None:
    """Apply AdamW, with decoupled weight decay (arXiv 1711.05101, algorithm 2). A run uses
    Megatron's own implementation, which computes the same, several weights at once."""
    first.lerp_(grad, 1.0 - settings.beta1)
    second.lerp_(grad.square(), 1.0 - settings.beta2)
    root = (second / (1.0 - settings.beta2**step)).sqrt_().add_(settings.eps)
    weight.mul_(1.0 - lr * weight_decay)
    weight.addcdiv_(first, root, value=-lr / (1.0 - settings.beta1**step))


def lion(
    *,
    weight: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    step: int,
    lr: float,
    weight_decay: float,
    settings: Optimizer,
) -> None:
    """Move by the sign of a momentum (Lion, arXiv 2302.06675, algorithm 2), which needs a learning
    rate 3 to 10 times below AdamW's."""
    sign = first.lerp(grad, 1.0 - settings.beta1).sign_()
    weight.mul_(1.0 - lr * weight_decay).add_(sign, alpha=-lr)
    first.lerp_(grad, 1.0 - settings.beta2)


def sgd(
    *,
    weight: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    step: int,
    lr: float,
    weight_decay: float,
    settings: Optimizer,
) -> None:
    """Move along the gradient, with `beta1` of the previous step (heavy-ball momentum)."""
    first.mul_(settings.beta1).add_(grad)
    weight.mul_(1.0 - lr * weight_decay).add_(first, alpha=-lr)


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration (K. Jordan, kellerjordan.github.io/posts/muon)."""
_NUM_ITERATIONS = 5
_MIN_NORM = 1e-7
RMS = 0.2
"""Root mean square of AdamW's usual update, to which Muon's is scaled."""


class Muon:
    """M = `muon_momentum` M + (1 - `muon_momentum`) g; W -= lr 0.2 sqrt(max(rows, columns)) O, O =
    the nearest orthogonal matrix of g + `muon_momentum` (M - g), about: five Newton-Schulz
    iterations in bfloat16 (K. Jordan, kellerjordan.github.io/posts/muon). The scale makes the
    update as large as AdamW's, so that its learning rate fits (arXiv 2502.16982, section 2.2).
    AdamW updates what is no matrix of a layer."""

    def __call__(self, **step: Any) -> None:
        """Update everything but matrices of layers, as AdamW does."""
        adamw(**step)

    def momentum(
        self, *, grad: torch.Tensor, first: torch.Tensor, settings: Optimizer
    ) -> torch.Tensor:
        """Return Nesterov's momentum."""
        first.lerp_(grad, 1.0 - settings.muon_momentum)
        return grad.lerp(first, settings.muon_momentum)

    def direction(self, *, matrix: torch.Tensor) -> torch.Tensor:
        """Return the scaled orthogonal matrix."""
        return orthogonal(matrix).float().mul_(RMS * math.sqrt(max(matrix.shape)))


muon = Muon()


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return [rows, columns] bfloat16: U S V^T of the matrix with each singular value moved to
    about 1 (0.7 to 1.2)."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=_MIN_NORM)
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
