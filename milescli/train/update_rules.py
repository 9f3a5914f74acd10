"""Implements the built-in rules of `train.optimizer.rule`, whose protocol is in `optimizers`."""

from __future__ import annotations

import torch

from milescli.recipe.train import Optimizer


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
    """Decoupled weight decay (arXiv 1711.05101, algorithm 2). A run takes Megatron's own, which
    computes the same, several weights at once."""
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
    """The sign of a momentum (Lion, arXiv 2302.06675, algorithm 2), which wants a learning
    rate 3 to 10 times below AdamW's."""
    sign = torch.lerp(first, grad, 1.0 - settings.beta1).sign_()
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
    """The gradient, with `beta1` of the step before (heavy-ball momentum)."""
    first.mul_(settings.beta1).add_(grad)
    weight.mul_(1.0 - lr * weight_decay).add_(first, alpha=-lr)
