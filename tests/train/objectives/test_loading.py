"""Objectives of the user's: what is none is refused, what raises is named, and what cannot be
trained on does not reach a rank."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from milescli.core.errors import RecipeError
from milescli.core.plug_points import OBJECTIVES
from milescli.recipe.schema import Recipe
from milescli.train.base import TrainSequence
from milescli.train.objectives import load_objective, sequences_from
from milescli.train.streams import Stream

GOOD = TrainSequence(
    token_ids=np.arange(4, dtype=np.int32),
    loss_mask=np.array([False, True, True, False]),
    streams={"reward": np.zeros(4, np.float32)},
    token_weight=0.5,
    share=1.0,
    group=0,
)


def test_what_an_objective_of_the_user_raises_is_named_with_its_place() -> None:
    refused = pytest.raises(RecipeError, match="the objective `mine:fn` failed")
    with refused as caught, OBJECTIVES.guarded("mine:fn"):
        raise KeyError("no such stream")
    assert "no such stream" in caught.value.why and "test_loading.py" in caught.value.why
    with pytest.raises(KeyError), OBJECTIVES.guarded("policy"):
        raise KeyError("our own fault")


def none_at_all(*, recipe: Recipe) -> object:
    """Lacks everything."""
    return object()


def raising(*, recipe: Recipe) -> object:
    """Its author's mistake."""
    return recipe.train.no_such_key  # type: ignore[attr-defined]


def without_recipe() -> object:
    """Takes nothing."""
    return object()


def needy(*, recipe: Recipe) -> object:
    """Asks the ranks for what the engine says."""
    return SimpleNamespace(needs={Stream.ENGINE}, sequences=1, complete=1, loss=1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("polici", "no objective `polici`"),
        (f"{__name__}:none_at_all", "does not create an objective"),
        (f"{__name__}:raising", "the objective `.*` failed"),
        (f"{__name__}:needy", "needs a stream that trainer ranks cannot compute"),
        (f"{__name__}:GOOD", "is not callable"),
        (f"{__name__}:without_recipe", "cannot be an objective"),
    ],
)
def test_what_is_no_objective_is_refused(name: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_objective(name, Recipe())


def _made(*sequences: TrainSequence) -> list[TrainSequence]:
    objective = SimpleNamespace(sequences=lambda items: list(sequences))
    return sequences_from(objective, [None], name="mine:fn")  # type: ignore[arg-type]


def test_what_can_be_trained_on_passes_with_streams_of_any_name() -> None:
    masked = replace(GOOD, loss_mask=np.zeros(4, bool), share=0.0)
    assert _made(GOOD, masked) == [GOOD, masked]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"loss_mask": np.ones(3, bool)}, "`loss_mask` has 3 values for 4 tokens"),
        ({"streams": {"reward": np.zeros(5)}}, "`reward` has 5 values for 4 tokens"),
        ({"streams": {}}, "its streams are none, those of the first sequence reward"),
        ({"loss_mask": np.ones(4, bool)}, "its first token is trained on"),
        ({"share": 0.0}, "its share 0.0"),
        ({"share": -1.0}, "its share -1.0"),
        ({"token_weight": float("nan")}, "its token_weight is nan"),
    ],
)
def test_what_cannot_be_trained_on_is_named_by_its_number(
    change: dict[str, object], fault: str
) -> None:
    with pytest.raises(RecipeError, match="the objective `mine:fn` created a sequence") as refused:
        _made(GOOD, replace(GOOD, **change))  # type: ignore[arg-type]
    assert "sequence 1 of 2" in refused.value.why and fault in refused.value.why


def test_nothing_to_learn_from_is_refused() -> None:
    with pytest.raises(RecipeError, match="created no sequence"):
        _made()
