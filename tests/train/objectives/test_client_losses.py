"""Losses that clients choose, against their formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from milescli.recipe.schema import Recipe
from milescli.train.objectives import load_objective
from milescli.train.objectives.client_losses import BETA, HIGH, INPUTS, LOW, WEIGHT, objective_of
from milescli.train.packed_tokens import PackedTokens, Places
from milescli.train.streams import Stream

Numbers = torch.Tensor
NOW = torch.tensor([-0.2, -1.0, -2.0, -0.5])
BEFORE = torch.tensor([-0.1, -2.0, -1.0, -0.5])
ADVANTAGE = torch.tensor([1.0, -1.0, 2.0, 0.0])


def _ratio(now: Numbers) -> Numbers:
    return torch.exp(now - BEFORE)


FORMULAS: dict[str, Callable[[Numbers], Numbers]] = {
    "cross_entropy": lambda now: -(now * torch.arange(4.0)).sum(),
    "importance_sampling": lambda now: -(_ratio(now) * ADVANTAGE).sum(),
    "ppo": lambda now: (
        -torch.min(_ratio(now) * ADVANTAGE, _ratio(now).clamp(0.8, 1.2) * ADVANTAGE).sum()
    ),
    "cispo": lambda now: -(_ratio(now).detach().clamp(0.8, 1.2) * now * ADVANTAGE).sum(),
    "dro": lambda now: -(now * ADVANTAGE - 0.05 / 2 * (now - BEFORE) ** 2).sum(),
}


def _tokens(now: Numbers, **more: Numbers) -> PackedTokens:
    full = torch.ones(4)
    streams = {
        WEIGHT: torch.arange(4.0),
        LOW: 0.8 * full,
        HIGH: 1.2 * full,
        BETA: 0.05 * full,
        Stream.ENGINE: BEFORE,
        Stream.ADVANTAGE: ADVANTAGE,
    }
    places = Places(
        sequence=torch.zeros(4, dtype=torch.int64),
        offset=torch.arange(1, 5),
        lengths=torch.tensor([5]),
    )
    return PackedTokens(
        places=places,
        loss_mask=torch.ones(4, dtype=torch.bool),
        loss_weights=full,
        streams=streams,
        logprobs=now,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", INPUTS)
def test_loss_and_gradient_are_those_of_the_formula(name: str) -> None:
    objective = load_objective(objective_of(name), Recipe())
    now, theirs = (NOW.clone().requires_grad_() for _ in range(2))
    loss, expected = objective.loss(_tokens(now)).loss.sum(), FORMULAS[name](theirs)
    torch.testing.assert_close(loss, expected)
    loss.backward(), expected.backward()
    torch.testing.assert_close(now.grad, theirs.grad)


def test_candidates_are_the_targets_where_there_are_any() -> None:
    objective = load_objective(objective_of("cross_entropy"), Recipe())
    tokens = _tokens(torch.zeros(4), candidates=NOW[:, None])
    torch.testing.assert_close(objective.loss(tokens).loss.sum(), FORMULAS["cross_entropy"](NOW))
