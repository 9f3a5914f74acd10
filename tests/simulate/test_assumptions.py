"""`--assume`: what it sets, refuses and says of itself."""

from __future__ import annotations

import pytest

from milescli.core.errors import ExitCode, RecipeError
from milescli.recipe.schema import Recipe
from milescli.simulate.assumptions import KEYS, assumptions, find_warnings

RECIPE = Recipe(name="tiny")


def test_defaults_follow_the_recipe_and_say_where_they_come_from() -> None:
    assume = assumptions(RECIPE, [])
    assert assume.response_tokens == RECIPE.rollout.max_response_tokens / 2
    rows = {name: (value, origin) for name, value, origin in assume.rows()}
    assert rows.keys() == KEYS.keys()
    assert rows["response_sigma"] == (1.0, "a guess: a long tail")


def test_what_the_user_gives_stays_whatever_a_run_says() -> None:
    assume = assumptions(RECIPE, ["response_tokens=7"])
    later = assume.with_values("run x", response_tokens=9.0, prompt_tokens=3.0)
    rows = {name: (value, origin) for name, value, origin in later.rows()}
    assert rows["response_tokens"] == (7.0, "--assume")
    assert rows["prompt_tokens"] == (3.0, "run x")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("respons_tokens=3", "--assume response_tokens=3"),
        ("restart_s", "--assume restart_s=120"),
        ("foo", "--assume response_tokens=1"),
        ("respons_tokens=0", "--assume response_tokens=1"),
        ("kept_shares=7", "--assume kept_share=1"),
        ("restart_s=soon", "--assume restart_s=120"),
        ("restart_s=nan", "--assume restart_s=120"),
        ("kept_share=1.5", "--assume kept_share=1"),
        ("turns=0", "--assume turns=1"),
        ("response_tokens=1e6", "--assume response_tokens="),
    ],
)
def test_nonsense_is_refused_with_what_would_do(text: str, what: str) -> None:
    with pytest.raises(RecipeError) as refused:
        assumptions(RECIPE, [text])
    assert refused.value.fixes[0].startswith(what) and refused.value.exit_code is ExitCode.INVALID
    assumptions(RECIPE, [refused.value.fixes[0].removeprefix("--assume ")])


def test_defaults_that_do_not_fit_the_recipe_are_named() -> None:
    assert find_warnings(RECIPE, assumptions(RECIPE, [])) == []
    rollout = RECIPE.rollout.model_copy(update={"agent": "tools", "filter": "zero_variance"})
    recipe = RECIPE.model_copy(update={"rollout": rollout})
    agent, kept = find_warnings(recipe, assumptions(recipe, []))
    assert "turns" in agent and "kept_share" in kept
    with_values = assumptions(recipe, ["turns=3", "kept_share=0.7"])
    assert find_warnings(recipe, with_values) == []
