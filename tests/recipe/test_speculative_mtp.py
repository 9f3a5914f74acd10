"""`train.mtp`: what is refused beside it, before anything starts."""

from __future__ import annotations

import pytest

from milescli.core.errors import RecipeError
from tests.recipe.conftest import Place

ON = "train.mtp.loss_weight=0.1"


@pytest.mark.parametrize(
    ("sets", "what"),
    [
        (["train.mtp.trains_trunk=true"], "has no loss"),
        (["train.mtp.trains_trunk=true", "train.mtp.loss_weight=0"], "has no loss"),
        ([ON, "train.lora.rank=4"], "cannot be trained together with an adapter"),
        ([ON, "weights.channel=distributed"], "would not reach the engines"),
        ([ON, "weights.format=tests.weights.formats:halves"], "`weights.format="),
    ],
)
def test_what_does_not_go_with_it_is_refused(place: Place, sets: list[str], what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        place.load(sets=sets)


@pytest.mark.parametrize(("weight", "is_on"), [("null", False), ("0", False), ("0.1", True)])
def test_null_and_0_are_off(place: Place, weight: str, is_on: bool) -> None:
    recipe = place.load(sets=[f"train.mtp.loss_weight={weight}"]).recipe
    assert recipe.train.mtp.is_on is is_on
