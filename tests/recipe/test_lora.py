"""What goes with no adapter is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import RecipeError
from milescli.plan.memory import trained_shape
from milescli.recipe.load import LoadedRecipe, load

NOWHERE = Path("/nowhere")


def _loaded(recipe: str, *sets: str) -> LoadedRecipe:
    sets = ("train.lora.rank=8", *sets)
    return load(recipe, sets=list(sets), environ={}, cwd=NOWHERE, home=NOWHERE)


@pytest.mark.parametrize(
    ("recipe", "sets", "what"),
    [
        ("quickstart-reward-model", (), "does not support an adapter"),
        ("quickstart", ("train.lora.dropout=0.1",), "learns from samples"),
        ("quickstart", ("weights.format=tests.weights.formats:halves",), "with an adapter"),
        ("quickstart", ("train.lora.type=dora",), "`train.lora.type=dora` cannot be served"),
        (
            "quickstart",
            ("train.lora.type=dora", "train.lora.rank=null"),
            "`train.lora.type=dora` cannot be served",
        ),
        ("quickstart-moe", ("parallel.etp=2", "parallel.tp=1"), "cannot exceed `parallel.tp=1`"),
    ],
)
def test_it_is_refused(recipe: str, sets: tuple[str, ...], what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        _loaded(recipe, *sets)


def test_alpha_is_twice_the_rank_unless_it_is_given() -> None:
    shape = trained_shape(_loaded("quickstart").recipe)
    assert shape is not None and (shape.rank, shape.alpha) == (8, 16.0)
    shape = trained_shape(_loaded("quickstart", "train.lora.alpha=4").recipe)
    assert shape is not None and shape.alpha == 4.0


def test_rows_may_be_learned_with_dropout() -> None:
    assert _loaded("quickstart-sft", "train.lora.dropout=0.1").recipe.train.lora.dropout == 0.1


def test_an_adapter_over_random_weights_is_doubted() -> None:
    (doubt,) = _loaded("quickstart").warnings
    assert "over random weights" in doubt
    assert not _loaded("qwen3-0.6b").warnings
