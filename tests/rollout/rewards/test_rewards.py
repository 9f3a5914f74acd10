"""Tests of finding rewards by name, and of the contract that all of them bear."""

from __future__ import annotations

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.schema import Rollout
from milescli.rollout.contract import check_reward
from milescli.rollout.rewards import REWARDS, load_rewards, needs_label

COMPARING = {"math", "gsm8k", "exact_match", "f1"}
LETTER = [("Which?", "The answer is B.", "B"), ("Which?", "A", "B"), ("Which?", "", "B")]


@pytest.mark.parametrize("name", sorted(COMPARING))
def test_every_reward_that_compares_bears_the_contract(name: str) -> None:
    rewards = check_reward(load_rewards(Rollout(reward=name))[name])
    assert all(0.0 <= reward <= 1.0 for reward in rewards)
    assert rewards[1:3] == [0.0, 0.0]


@pytest.mark.parametrize("name", ["format", "length"])
def test_every_reward_that_looks_at_the_form_bears_the_contract(name: str) -> None:
    rewards = check_reward(load_rewards(Rollout(reward=name))[name])
    assert set(rewards) <= {0.0, 1.0}


def test_multiple_choice_bears_the_contract() -> None:
    reward = load_rewards(Rollout(reward="multiple_choice"))["multiple_choice"]
    assert check_reward(reward, examples=LETTER) == [1.0, 0.0, 0.0]


def test_which_rewards_need_a_label() -> None:
    needing = {name for name in REWARDS.builtin if needs_label(Rollout(reward=name))}
    assert needing == COMPARING | {"multiple_choice"}


def test_an_unknown_reward_is_answered_with_the_nearest() -> None:
    with pytest.raises(RecipeError) as error:
        load_rewards(Rollout(reward="gms8k"))
    assert error.value.fixes == ["--set rollout.reward=gsm8k"]


def test_a_reward_of_another_signature_is_refused() -> None:
    with pytest.raises(RecipeError, match="lacks the parameters prompt, response, label"):
        load_rewards(Rollout(reward="json:JSONDecodeError"))


def test_a_reward_by_import_path_needs_a_label_only_where_it_says_so() -> None:
    assert not needs_label(Rollout(reward="tests.rollout.rewards.bad_rewards:good"))
    assert needs_label(Rollout(reward="milescli.rollout.rewards.gsm8k:gsm8k"))
    assert needs_label(Rollout(reward={"tests.rollout.rewards.bad_rewards:good": 1.0, "math": 0.0}))
