"""The loss of a reward model beside its formula, in float64 and plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from milescli.recipe.schema import Recipe
from milescli.train.objectives import load_objective
from tests.train.objectives.pairs import outcome, random_pairs


def _recipe(center_coef: float = 0.0) -> Recipe:
    train = {"objective": "reward_model", "reward_model": {"center_coef": center_coef}}
    return Recipe.model_validate({"data": {"train": "pairs.jsonl"}, "train": train})


@pytest.mark.parametrize("center_coef", [0.0, 0.01])
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_and_its_gradient_are_those_of_the_formula(seed: int, center_coef: float) -> None:
    pairs = random_pairs(seed)
    got = outcome(_recipe(center_coef), pairs, seed=seed, are_scores=True)
    ends, start = [], 0
    for side in (side for pair in pairs for side in pair.sides):
        # one token stands behind the last: what the model says of it, it says of all before
        ends.append(start + side.num_tokens - 1)
        start += side.num_tokens
    scores = got.values.clone().requires_grad_()
    chosen, rejected = scores[torch.tensor(ends)].view(-1, 2).unbind(1)
    margins = torch.tensor([pair.margin for pair in pairs], dtype=torch.float64)
    losses = torch.log1p(torch.exp(-(chosen - rejected - margins)))
    loss = (losses + center_coef * (chosen + rejected) ** 2).mean()
    loss.backward()
    assert got.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    torch.testing.assert_close(got.gradient, scores.grad, rtol=1e-5, atol=1e-9)
    assert got.figures == pytest.approx(
        {
            "pair_accuracy": float((chosen > rejected).double().mean()),
            "score_margin": float((chosen - rejected).mean()),
            "score_chosen": float(chosen.mean()),
            "score_rejected": float(rejected.mean()),
        },
        rel=1e-5,
    )


def test_a_score_is_of_the_whole_response_and_pairs_stay_together() -> None:
    pairs = random_pairs(0, count=2)
    sequences = load_objective("reward_model", _recipe()).sequences(pairs)
    sides = [side for pair in pairs for side in pair.sides]
    for sequence, side in zip(sequences, sides, strict=True):
        assert sequence.token_ids[:-1].tolist() == list(side.token_ids)
        assert sequence.loss_mask.tolist() == [False] * side.num_tokens + [True]
    assert [sequence.unit for sequence in sequences] == [0, 0, 1, 1]
