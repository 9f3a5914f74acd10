"""Random pairs, and what an objective makes of them in one process, beside plain formulas."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from milescli.core.types import Pair, Trajectory
from milescli.recipe.schema import Recipe
from milescli.train.base import Figure, Objective, Reduce
from milescli.train.contract import as_microbatch, packed
from milescli.train.objectives import load_objective
from tests.samples import make_trajectory


def random_side(rng: np.random.Generator) -> Trajectory:
    """A prompt, and a response of which some tokens may not be learned."""
    length = int(rng.integers(1, 9))
    mask = [bool(on) for on in rng.random(length) < 0.8]
    mask[-1] = True
    prompt = rng.integers(3, 9, rng.integers(1, 5)).tolist()
    return make_trajectory(prompt, rng.integers(3, 9, length).tolist(), mask=mask)


def random_pairs(seed: int, *, count: int = 5, references: bool = False) -> list[Pair]:
    """Of uneven lengths, with margins."""
    rng = np.random.default_rng(seed)
    pairs = [
        Pair(
            index=index,
            chosen=random_side(rng),
            rejected=random_side(rng),
            margin=float(rng.random()),
        )
        for index in range(count)
    ]
    if not references:
        return pairs
    return [
        replace(
            pair,
            references=tuple(
                array("f", -rng.gamma(1.0, 1.0, side.num_tokens)) for side in pair.sides
            ),
        )
        for pair in pairs
    ]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an objective says of a step in one process."""

    loss: float
    gradient: torch.Tensor
    """[S] by the log-prob, or the score, of each token."""
    figures: dict[str, float]
    values: torch.Tensor
    """[S] the made-up log-probs or scores."""
    sums: torch.Tensor
    """[N, 2] their sum and number over the learned tokens of each sequence."""


def outcome(
    recipe: Recipe,
    items: list[Any],
    *,
    seed: int = 0,
    streams: dict[str, torch.Tensor] | None = None,
    are_scores: bool = False,
) -> Outcome:
    """`streams`: what ranks compute, [S]. Everything is float64."""
    objective: Objective[Any] = load_objective(recipe.train.objective, recipe)
    tokens = packed(objective.sequences(items), extra=streams)
    objective.complete(tokens)
    values = values_of(len(tokens.loss_mask), seed, are_scores=are_scores).requires_grad_()
    tokens = as_microbatch(tokens, values, are_scores=are_scores)
    tokens.entropy = None if are_scores else torch.ones_like(values)
    terms = objective.loss(tokens)
    weights = torch.where(tokens.loss_mask, tokens.loss_weights.double(), 0.0)
    loss = (torch.where(tokens.loss_mask, terms.loss, 0.0) * weights).sum()
    loss.backward()
    mask = tokens.loss_mask

    def shown(figure: Figure) -> float:
        if figure.reduce is Reduce.LOSS:
            return float((torch.where(mask, figure.values, 0.0) * weights).sum())
        return float(figure.values[mask].mean())

    assert values.grad is not None
    parts = [tokens.sum_by_sequence(values.detach()), tokens.sum_by_sequence(mask)]
    return Outcome(
        loss=float(loss),
        gradient=values.grad,
        figures={name: shown(figure) for name, figure in terms.figures.items()},
        values=values.detach(),
        sums=torch.stack([part.double() for part in parts], dim=1),
    )


def values_of(count: int, seed: int, *, are_scores: bool = False) -> torch.Tensor:
    """[count] float64: log-probs, or scores around 0."""
    rng = np.random.default_rng(1000 + seed)
    made = rng.normal(0.0, 2.0, count) if are_scores else -rng.gamma(1.0, 1.0, count)
    return torch.from_numpy(made)


def learned_places(sides: list[Trajectory]) -> list[torch.Tensor]:
    """[sides] where the learned tokens of each stand among all tokens that are predicted."""
    places, start = [], 0
    for side in sides:
        on = np.flatnonzero(np.frombuffer(side.loss_mask, np.bool_)[1:])
        places.append(torch.from_numpy(on + start))
        start += side.num_tokens - 1
    return places
