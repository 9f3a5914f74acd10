"""KTO beside its formula, in float64 and plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from milescli.core.types import ImageSpan, Pair, Trajectory
from milescli.recipe.schema import Recipe
from milescli.train.objectives import load_objective
from milescli.train.streams import Stream
from tests.samples import make_trajectory
from tests.train.objectives.pairs import learned_places, outcome, random_pairs, values_of

BETA, GOOD, BAD = 0.3, 1.5, 0.75
RECIPE = Recipe.model_validate(
    {
        "data": {"train": "judged.jsonl"},
        "train": {
            "objective": "preference",
            "preference": {
                "loss": "kto",
                "beta": BETA,
                "desirable_weight": GOOD,
                "undesirable_weight": BAD,
            },
        },
    }
)


def _judged(seed: int, *, as_pairs: bool) -> list[Pair]:
    pairs = random_pairs(seed, count=4)
    if as_pairs:
        return pairs
    return [
        Pair(
            index=pair.index,
            chosen=pair.chosen if good else None,
            rejected=None if good else pair.rejected,
        )
        for pair, good in zip(pairs, [True, False, False, True], strict=True)
    ]


def _all_sides(items: list[Pair]) -> list[Trajectory]:
    """As the objective sends them: the judged ones, then those of other rows' prompts."""
    sides = [side for pair in items for side in pair.sides]
    mismatched = []
    for pair, after in zip(items, items[1:] + items[:1], strict=True):
        for place, side in enumerate(pair.sides):
            other = after.sides[min(place, len(after.sides) - 1)]
            start, begin = side.loss_mask.index(1), other.loss_mask.index(1)
            mismatched.append(
                make_trajectory(
                    side.token_ids[:start],
                    other.token_ids[begin:],
                    mask=[bool(on) for on in other.loss_mask[begin:]],
                )
            )
    return sides + mismatched


@pytest.mark.parametrize("as_pairs", [True, False])
@pytest.mark.parametrize("scale", [0.5, 2.0])
@pytest.mark.parametrize("seed", range(2))
def test_the_loss_and_its_gradient_are_those_of_the_formula(
    seed: int, scale: float, as_pairs: bool
) -> None:
    """`scale`: below 1 the policy is ahead of the reference, and the KL is above 0."""
    items = _judged(seed, as_pairs=as_pairs)
    lines = _all_sides(items)
    count = sum(line.num_tokens - 1 for line in lines)
    rng = np.random.default_rng(seed)
    reference = torch.from_numpy(-rng.gamma(1.0, 1.0, count))
    old = torch.from_numpy(-rng.gamma(1.0, scale, count))
    got = outcome(RECIPE, items, seed=seed, streams={Stream.OLD: old, Stream.REFERENCE: reference})

    num = len(lines) // 2
    places = learned_places(lines)
    gaps = [(old - reference)[at].sum() for at in places[num:]]
    baseline = torch.stack(gaps).mean().clamp(min=0)
    values = values_of(count, seed).requires_grad_()
    losses = []
    judged = [side is pair.chosen for pair in items for side in pair.sides]
    for at, good in zip(places[:num], judged, strict=True):
        reward = (values[at] - reference[at]).sum()
        sign, weight = (1, GOOD) if good else (-1, BAD)
        losses.append(weight * (1 - torch.sigmoid(sign * BETA * (reward - baseline))))
    loss = torch.stack(losses).mean()
    loss.backward()
    assert got.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    torch.testing.assert_close(got.gradient, values.grad, rtol=1e-4, atol=1e-8)
    assert got.figures["kl"] == pytest.approx(float(baseline), rel=1e-5, abs=1e-9)
    assert (got.figures["kl"] > 0) == (scale < 1)


def test_no_response_stands_beside_its_own_prompt() -> None:
    """Else the estimate of the KL would be of responses to the question."""
    items = [
        Pair(
            index=index,
            chosen=make_trajectory([100 + index], [200 + index, 2]),
            rejected=make_trajectory([100 + index], [200 + index, 3]),
        )
        for index in range(3)
    ]
    sequences = load_objective("preference", RECIPE).sequences(items)
    matched = [sequence.token_ids[1] - sequence.token_ids[0] == 100 for sequence in sequences]
    assert matched == [True] * 6 + [False] * 6
    assert [sequence.share for sequence in sequences] == [1.0] * 6 + [0.0] * 6


def test_a_row_that_a_step_has_twice_is_joined_with_another() -> None:
    """A step of more rows than the file has crosses epochs."""
    first, other = (
        Pair(index=index, chosen=make_trajectory([100 + index], [200 + index]), rejected=None)
        for index in range(2)
    )

    def joined(items: list[Pair]) -> list[list[int]]:
        sequences = load_objective("preference", RECIPE).sequences(items)
        return [sequence.token_ids.tolist() for sequence in sequences[len(items) :]]

    assert joined([first, first, other]) == [[100, 201], [100, 201], [101, 200]]
    assert joined([first, first]) == [], "no response stands beside its own prompt"


def test_joined_sequences_show_the_images_of_both_rows() -> None:
    def image(start: int, name: str) -> ImageSpan:
        return ImageSpan(start=start, num_tokens=2, grid=(1, 2, 1), sha256=name)

    asked = replace(make_trajectory([8, 9, 9], [4, 5]), image_spans=[image(1, "asked")])
    later = replace(
        make_trajectory([9, 9], [6, 7, 9, 9, 5], mask=[True, True, False, False, True]),
        image_spans=[image(0, "first"), image(4, "second")],
    )
    items = [
        Pair(index=index, chosen=side, rejected=None) for index, side in enumerate((asked, later))
    ]

    def joined(most: int) -> tuple[list[int], list[tuple[int, str]]]:
        data = RECIPE.data.model_copy(update={"max_row_tokens": most})
        recipe = RECIPE.model_copy(update={"data": data})
        made = load_objective("preference", recipe).sequences(items)[len(items)]
        return made.token_ids.tolist(), [(span.start, span.sha256) for span in made.image_spans]

    assert joined(12) == ([8, 9, 9, 6, 7, 9, 9, 5], [(1, "asked"), (5, "second")])
    assert joined(6) == ([8, 9, 9, 6, 7], [(1, "asked")]), "nothing is seen of a part of an image"


def test_joined_sequences_are_no_longer_than_rows() -> None:
    """A model may have no more positions."""
    data = RECIPE.data.model_copy(update={"max_row_tokens": 12})
    sides = [make_trajectory(range(10), range(2)), make_trajectory(range(2), range(10))]
    items = [
        Pair(index=0, chosen=sides[0], rejected=None),
        Pair(index=1, chosen=None, rejected=sides[1]),
    ]
    made = load_objective("preference", RECIPE.model_copy(update={"data": data})).sequences(items)
    sizes = [(len(one.token_ids), int(one.loss_mask.sum())) for one in made]
    assert sizes == [(12, 2), (12, 10), (12, 2), (4, 2)]
