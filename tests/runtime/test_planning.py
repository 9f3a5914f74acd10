"""What is refused when the model's facts are known, before a machine is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.load import load
from milescli.runtime.planning import plan_only


def unchanged(*, spec: object, config: object, facts: object, layer: int) -> object:
    """As it is."""
    return spec


@pytest.mark.parametrize("recipe", ["nemotron-3-nano", "gemma-4-26b-a4b", "qwen3-8b"])
def test_routes_that_no_engine_tells_are_refused_by_the_family_name(
    tmp_path: Path, recipe: str
) -> None:
    sets = ["train.routing_replay=true"]
    loaded = load(recipe, sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    with pytest.raises(RecipeError, match=r"there is no routing of a `\w+` model to replay"):
        plan_only(loaded)


def test_a_layer_spec_of_a_hybrid_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    sets = [f"model.layer_spec={__name__}:unchanged"]
    loaded = load("nemotron-3-nano-4b", sets=sets, environ={}, cwd=tmp_path, home=tmp_path)
    with pytest.raises(RecipeError, match="cannot change a model of type `nemotron_h`"):
        plan_only(loaded)
