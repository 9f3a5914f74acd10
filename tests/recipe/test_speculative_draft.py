"""`train.draft`: what is refused beside it, before anything starts."""

from __future__ import annotations

import pytest

from milescli.core.errors import RecipeError
from tests.recipe.conftest import Place

LEARNS = "train.draft.lr=1e-3"
GUESSES = ["rollout.speculative.kind=draft", "rollout.speculative.model=somewhere"]


@pytest.mark.parametrize(
    ("sets", "what"),
    [
        ([LEARNS], "no draft model to train"),
        ([LEARNS, "rollout.speculative.kind=mtp"], "no draft model to train"),
        ([LEARNS, *GUESSES, "weights.channel=distributed"], "would not reach the engines"),
        ([LEARNS, *GUESSES, "weights.format=tests.weights.formats:halves"], "`weights.format="),
    ],
)
def test_what_does_not_go_with_it_is_refused(place: Place, sets: list[str], what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        place.load(sets=sets)


def test_it_is_off_by_itself(place: Place) -> None:
    assert not place.load(sets=GUESSES).recipe.train.draft.is_on
    assert place.load(sets=[LEARNS, *GUESSES]).recipe.train.draft.is_on
