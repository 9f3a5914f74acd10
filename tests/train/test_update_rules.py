"""Update rules of weights against torch's own, and their definitions."""

from __future__ import annotations

import torch

from milescli.core.plug_points import RULES
from milescli.recipe.train import Optimizer
from milescli.train.contract import check_rule
from milescli.train.optimizers import UpdateRule

SETTINGS = Optimizer(lr=0.01, beta1=0.9, beta2=0.95)


def _after(rule: UpdateRule, grads: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    weight, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step, grad in enumerate(grads, 1):
        rule(
            weight=weight,
            grad=grad.clone(),
            first=first,
            second=second,
            step=step,
            lr=0.01,
            weight_decay=0.1,
            settings=SETTINGS,
        )
    return weight


def _torch_after(optimizer: type, grads: torch.Tensor, start: torch.Tensor, **options: object):
    weight = torch.nn.Parameter(start.clone())
    own = optimizer([weight], lr=0.01, **options)
    for grad in grads:
        weight.grad = grad.clone()
        own.step()
    return weight.detach()


def test_they_compute_what_torch_and_the_paper_do() -> None:
    rng = torch.Generator().manual_seed(3)
    start, grads = torch.randn(40, generator=rng), torch.randn(12, 40, generator=rng)
    options = {"betas": (0.9, 0.95), "eps": SETTINGS.eps, "weight_decay": 0.1}
    expected = _torch_after(torch.optim.AdamW, grads, start, **options)
    torch.testing.assert_close(_after(RULES.load("adamw"), grads, start), expected)

    decayed, momentum = start.clone(), torch.zeros(40)
    for grad in grads:
        momentum = 0.9 * momentum + grad
        decayed = decayed * (1 - 0.01 * 0.1) - 0.01 * momentum
    torch.testing.assert_close(_after(RULES.load("sgd"), grads, start), decayed)

    weight, momentum = start.clone(), torch.zeros(40)
    for grad in grads:  # algorithm 2 of arXiv 2302.06675
        update = torch.sign(0.9 * momentum + 0.1 * grad)
        momentum = 0.95 * momentum + 0.05 * grad
        weight = weight - 0.01 * (update + 0.1 * weight)
    torch.testing.assert_close(_after(RULES.load("lion"), grads, start), weight)


def test_all_that_ship_bear_the_contract() -> None:
    for name in RULES.builtin:
        check_rule(RULES.load(name))
