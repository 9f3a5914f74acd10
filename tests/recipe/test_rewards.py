"""Rewards of a recipe: one or several with weights, and what is refused of their settings."""

from __future__ import annotations

import pytest

from milescli.core.errors import RecipeError
from tests.recipe.conftest import SMALL, Place

JUDGE = ["rollout.reward=judge", "rollout.judge.url=http://h/v1", "rollout.judge.model=m"]
REMOTE = ["rollout.reward=remote", "rollout.remote_reward.url=https://h/score"]


def test_several_rewards_are_a_mapping_on_the_command_line_and_in_a_file(place: Place) -> None:
    wanted = {"math": 1.0, "format": 0.1, "my.rewards:strict": -1.0}
    by_set = place.load(sets=["rollout.reward={math: 1, format: 0.1, my.rewards:strict: -1}"])
    by_file = place.load(
        f"{SMALL}rollout:\n  reward:\n    math: 1.0\n    format: 0.1\n    my.rewards:strict: -1\n"
    )
    assert by_set.recipe.rollout.reward == by_file.recipe.rollout.reward == wanted
    assert by_set.recipe.rollout.reward_name == "math + 0.1 x format + -1 x my.rewards:strict"


def test_a_mapping_takes_the_place_of_a_name_and_the_other_way_round(place: Place) -> None:
    several = f"{SMALL}rollout: {{reward: {{math: 1.0, format: 0.1}}}}\n"
    assert place.load(several, sets=["rollout.reward=gsm8k"]).recipe.rollout.reward == "gsm8k"
    one = f"{SMALL}rollout: {{reward: gsm8k}}\n"
    assert place.load(one, sets=["rollout.reward={math: 1}"]).recipe.rollout.reward == {"math": 1.0}


@pytest.mark.parametrize(
    ("sets", "what"),
    [
        (["rollout.reward={}"], "does not name a reward"),
        (["rollout.reward={math: 0}"], "all weights of"),
        (["rollout.reward={math: much}"], "cannot be `{math: much}`"),
        (["rollout.reward={math: .nan}"], "cannot be `{math: .nan}`"),
        (["rollout.reward=length", "rollout.length.target_tokens=256"], "cannot start at 256"),
        (["rollout.reward=judge"], "`judge` needs an address"),
        (JUDGE[:2], "the judge needs a model"),
        ([*JUDGE, "rollout.judge.parse=("], "not a valid regular expression"),
        ([*JUDGE, "rollout.judge.parse=7"], "first group is the score"),
        (
            [JUDGE[0], JUDGE[2], "rollout.judge.url=localhost:8000"],
            "not the address of an HTTP server",
        ),
        (["rollout.reward=remote"], "`remote` needs an address"),
        (
            [REMOTE[0], "rollout.remote_reward.url=http://h:none/"],
            "not the address of an HTTP server",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(place: Place, sets: list[str], what: str) -> None:
    with pytest.raises(RecipeError) as refused:
        place.load(sets=sets)
    assert what in str(refused.value) and refused.value.fixes


def test_a_password_in_an_address_is_refused_and_not_repeated(place: Place) -> None:
    with pytest.raises(RecipeError) as refused:
        place.load(sets=[REMOTE[0], "rollout.remote_reward.url=https://me:hunter2@h/"])
    assert "secrets must come from the environment" in str(refused.value)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("reward", "what"),
    [
        ("judge", "`judge` needs an address"),
        ("remote", "`remote` needs an address"),
        ("reward_model", "`reward_model` needs a model"),
        ("length", "cannot start at 256"),
    ],
)
def test_the_reward_of_a_source_needs_its_settings_too(
    place: Place, reward: str, what: str
) -> None:
    mix = f"data.mix=[{{path: a.jsonl, reward: {reward}}}, {{path: b.jsonl}}]"
    sets = ["data.prompts=null", mix, "rollout.length.target_tokens=256"]
    with pytest.raises(RecipeError, match=what):
        place.load(sets=sets)


@pytest.mark.parametrize("sets", [JUDGE, REMOTE, ["rollout.reward=length"]])
def test_what_is_complete_is_taken(place: Place, sets: list[str]) -> None:
    assert place.load(sets=sets).recipe.rollout.reward == sets[0].partition("=")[2]
