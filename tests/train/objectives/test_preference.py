"""Preference losses beside their formulas, in float64 and plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from milescli.core.types import Pair
from milescli.recipe.schema import Recipe
from milescli.recipe.train import Preference
from milescli.train.objectives import load_objective
from milescli.train.objectives.preference import orpo
from milescli.train.streams import Stream
from tests.train.objectives.pairs import learned_places, outcome, random_pairs, values_of

BETA, GAMMA = 0.3, 0.7
Sides = tuple[torch.Tensor, torch.Tensor]
"""[pairs] of the chosen, of the rejected."""


def _log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return -torch.log1p(torch.exp(-x))


def _sigmoid(sums: Sides, references: Sides, counts: Sides) -> torch.Tensor:
    ratios = (sums[0] - references[0]) - (sums[1] - references[1])
    return -_log_sigmoid(BETA * ratios)


def _smoothed(sums: Sides, references: Sides, counts: Sides) -> torch.Tensor:
    ratios = BETA * ((sums[0] - references[0]) - (sums[1] - references[1]))
    return -0.9 * _log_sigmoid(ratios) - 0.1 * _log_sigmoid(-ratios)


def _hinge(sums: Sides, references: Sides, counts: Sides) -> torch.Tensor:
    ratios = (sums[0] - references[0]) - (sums[1] - references[1])
    return torch.clamp(1 - BETA * ratios, min=0)


def _ipo(sums: Sides, references: Sides, counts: Sides) -> torch.Tensor:
    ratios = [(s - r) / n for s, r, n in zip(sums, references, counts, strict=True)]
    return (ratios[0] - ratios[1] - 1 / (2 * BETA)) ** 2


def _simpo(sums: Sides, references: Sides, counts: Sides) -> torch.Tensor:
    return -_log_sigmoid(BETA * (sums[0] / counts[0] - sums[1] / counts[1]) - GAMMA)


def _orpo(sums: Sides, references: Sides, counts: Sides) -> torch.Tensor:
    odds = []
    for total, count in zip(sums, counts, strict=True):
        chance = torch.exp(total / count)
        odds.append(torch.log(chance / (1 - chance)))
    return -(sums[0] / counts[0]) - BETA * _log_sigmoid(odds[0] - odds[1])


def _per_token(sums: Sides, references: Sides, counts: Sides) -> torch.Tensor:
    ratios = [(s - r) / n for s, r, n in zip(sums, references, counts, strict=True)]
    return -_log_sigmoid(BETA * (ratios[0] - ratios[1]))


def _robust(sums: Sides, references: Sides, counts: Sides) -> torch.Tensor:
    ratios = BETA * ((sums[0] - references[0]) - (sums[1] - references[1]))
    return (-0.9 * _log_sigmoid(ratios) + 0.1 * _log_sigmoid(-ratios)) / 0.8


def _rewards(sums: Sides, references: Sides) -> Sides:
    good, bad = (BETA * (s - r) for s, r in zip(sums, references, strict=True))
    return good, bad


def _exo(sums: Sides, references: Sides, counts: Sides) -> torch.Tensor:
    chances = torch.softmax(torch.stack(_rewards(sums, references)), dim=0)
    return chances[0] * torch.log(chances[0] / 0.9) + chances[1] * torch.log(chances[1] / 0.1)


def _nca(sums: Sides, references: Sides, counts: Sides) -> torch.Tensor:
    good, bad = _rewards(sums, references)
    return -_log_sigmoid(good) - _log_sigmoid(-good) / 2 - _log_sigmoid(-bad) / 2


def _bco(sums: Sides, references: Sides, counts: Sides) -> torch.Tensor:
    good, bad = _rewards(sums, references)
    return -_log_sigmoid(good) - _log_sigmoid(-bad)


def _sppo(sums: Sides, references: Sides, counts: Sides) -> torch.Tensor:
    good, bad = _rewards(sums, references)
    return ((good - 0.5) ** 2 + (bad + 0.5) ** 2) / BETA**2


def _apo_zero(sums: Sides, references: Sides, counts: Sides) -> torch.Tensor:
    good, bad = _rewards(sums, references)
    return 1 - torch.sigmoid(good) + torch.sigmoid(bad)


def _apo_down(sums: Sides, references: Sides, counts: Sides) -> torch.Tensor:
    good, bad = _rewards(sums, references)
    return torch.sigmoid(good) + 1 - torch.sigmoid(good - bad)


def _cpo(sums: Sides, references: Sides, counts: Sides) -> torch.Tensor:
    return -_log_sigmoid(BETA * (sums[0] - sums[1])) - sums[0] / counts[0]


def _with_imitation(sums: Sides, references: Sides, counts: Sides) -> torch.Tensor:
    return _sigmoid(sums, references, counts) - 0.5 * sums[0] / counts[0]


FORMULAS: dict[str, tuple[dict[str, object], Callable[[Sides, Sides, Sides], torch.Tensor]]] = {
    "sigmoid": ({"loss": "sigmoid"}, _sigmoid),
    "cDPO": ({"loss": "sigmoid", "label_smoothing": 0.1}, _smoothed),
    "hinge": ({"loss": "hinge"}, _hinge),
    "ipo": ({"loss": "ipo"}, _ipo),
    "simpo": ({"loss": "simpo", "gamma": GAMMA}, _simpo),
    "orpo": ({"loss": "orpo"}, _orpo),
    "sigmoid_norm": ({"loss": "sigmoid_norm"}, _per_token),
    "robust": ({"loss": "robust", "label_smoothing": 0.1}, _robust),
    "exo": ({"loss": "exo", "label_smoothing": 0.1}, _exo),
    "nca": ({"loss": "nca"}, _nca),
    "bco": ({"loss": "bco"}, _bco),
    "sppo": ({"loss": "sppo"}, _sppo),
    "apo_zero": ({"loss": "apo_zero"}, _apo_zero),
    "apo_down": ({"loss": "apo_down"}, _apo_down),
    "cpo": ({"loss": "cpo"}, _cpo),
    "imitation": ({"loss": "sigmoid", "sft_weight": 0.5}, _with_imitation),
}


def _recipe(**settings: object) -> Recipe:
    preference = {"beta": BETA, **settings}
    return Recipe.model_validate(
        {
            "data": {"train": "pairs.jsonl"},
            "train": {"objective": "preference", "preference": preference},
        }
    )


def _sides_of(values: torch.Tensor, pairs: list[Pair]) -> tuple[Sides, Sides]:
    """Sums over the learned tokens, and how many these are."""
    places = learned_places([side for pair in pairs for side in pair.sides])
    sums = torch.stack([values[at].sum() for at in places]).view(-1, 2)
    counts = torch.tensor([float(len(at)) for at in places], dtype=torch.float64).view(-1, 2)
    return sums.unbind(1), counts.unbind(1)


def _references(pairs: list[Pair]) -> torch.Tensor:
    """[S]"""
    return torch.from_numpy(
        np.concatenate(
            [np.array(line, np.float64)[1:] for pair in pairs for line in pair.references]
        )
    )


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("seed", range(3))
def test_a_loss_and_its_gradient_are_those_of_the_formula(name: str, seed: int) -> None:
    settings, formula = FORMULAS[name]
    pairs = random_pairs(seed, references=True)
    got = outcome(_recipe(**settings), pairs, seed=seed)
    values = values_of(len(got.values), seed).requires_grad_()
    sums, counts = _sides_of(values, pairs)
    references, _ = _sides_of(_references(pairs), pairs)
    loss = formula(sums, references, counts).mean()
    loss.backward()
    assert got.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    torch.testing.assert_close(got.gradient, values.grad, rtol=1e-5, atol=1e-9)
    assert got.gradient.abs().max() > 1e-4, "the comparison is blind"


def test_figures_say_how_far_the_sides_are_apart() -> None:
    pairs = random_pairs(4, references=True)
    got = outcome(_recipe(), pairs)
    (chosen, rejected), _ = _sides_of(got.values, pairs)
    (chosen_by, rejected_by), _ = _sides_of(_references(pairs), pairs)
    ours, theirs = BETA * (chosen - chosen_by), BETA * (rejected - rejected_by)
    assert got.figures == pytest.approx(
        {
            "reward_chosen": float(ours.mean()),
            "reward_rejected": float(theirs.mean()),
            "reward_margin": float((ours - theirs).mean()),
            "pair_accuracy": float((ours > theirs).double().mean()),
            "chosen_logprob": float(chosen.mean()),
            "rejected_logprob": float(rejected.mean()),
            "entropy": 1.0,
        },
        rel=1e-5,
    )
    assert 0 < got.figures["pair_accuracy"] < 1


def test_a_live_reference_is_asked_for_and_gives_what_a_cached_one_does() -> None:
    pairs = random_pairs(5, references=True)
    cached = outcome(_recipe(), pairs)
    bare = random_pairs(5)
    streams = {Stream.REFERENCE: _references(pairs)}
    live = outcome(_recipe(reference="live"), bare, streams=streams)
    assert live.loss == pytest.approx(cached.loss, rel=1e-6)
    assert load_objective("preference", _recipe(reference="live")).needs == {Stream.REFERENCE}
    assert load_objective("preference", _recipe()).needs == set()
    for name in ("orpo", "simpo"):
        assert load_objective("preference", _recipe(loss=name, reference="live")).needs == set()


def test_orpo_keeps_its_digits_where_a_response_is_nearly_certain() -> None:
    settings = Preference(loss="orpo", beta=BETA)
    values = [-1e-6, -1e-3, -0.5, -0.7, -5.0, -50.0]
    chosen, rejected = (
        torch.tensor([pair[at] for pair in itertools.product(values, values)]) for at in (0, 1)
    )
    odds = [x.double() - torch.log(-torch.expm1(x.double())) for x in (chosen, rejected)]
    exact = -BETA * torch.nn.functional.logsigmoid(odds[0] - odds[1])
    torch.testing.assert_close(
        orpo(chosen, rejected, settings).double(), exact, rtol=1e-5, atol=1e-7
    )
    certain = torch.zeros(1, requires_grad=True)
    orpo(certain, torch.tensor([-1.0]), settings).backward()
    assert certain.grad is not None and bool(torch.isfinite(certain.grad).all()), (
        "a chance of one has no odds, and must not end a run"
    )


def test_a_row_that_is_no_pair_is_our_mistake() -> None:
    (pair,) = random_pairs(0, count=1)
    alone = Pair(index=0, chosen=pair.chosen, rejected=None)
    with pytest.raises(AssertionError, match="row 1 is not a pair"):
        load_objective("preference", _recipe()).sequences([alone])
