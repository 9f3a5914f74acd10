"""Update rules of weights against torch's own, and their definitions."""

from __future__ import annotations

import pytest
import torch

from milescli.core.plug_points import RULES
from milescli.recipe.train import Optimizer
from milescli.train.contract import check_rule
from milescli.train.optimizers import UpdateRule, orthogonal, takes_matrices

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


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (16, 16)])
def test_muon_computes_what_torch_does_for_a_matrix(shape: tuple[int, int]) -> None:
    rng = torch.Generator().manual_seed(5)
    start, grads = torch.randn(shape, generator=rng), torch.randn(9, *shape, generator=rng)
    expected = _torch_after(
        torch.optim.Muon, grads, start, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    rule = RULES.load("muon")
    assert takes_matrices(rule) and not takes_matrices(RULES.load("lion"))
    weight, first = start.clone(), torch.zeros_like(start)
    for grad in grads:
        momenta = rule.momentum(grad=grad, first=first, settings=SETTINGS)
        weight.mul_(1 - 0.01 * 0.1).sub_(rule.direction(matrix=momenta), alpha=0.01)
    torch.testing.assert_close(weight, expected)


def test_the_direction_of_muon_is_near_an_orthogonal_matrix_of_adams_size() -> None:
    matrix = torch.randn(24, 64, generator=torch.Generator().manual_seed(6))
    values = torch.linalg.svdvals(orthogonal(matrix).float())
    assert values.min() > 0.6 and values.max() < 1.3
    made = RULES.load("muon").direction(matrix=matrix)
    assert float(made.square().mean().sqrt()) == pytest.approx(0.2, rel=0.2)


def test_all_that_ship_bear_the_contract() -> None:
    for name in RULES.builtin:
        check_rule(RULES.load(name))
