"""Tests of finding rewards by name, and of the contract that all of them bear."""

from __future__ import annotations

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.schema import Rollout
from milescli.rollout.contract import check_reward
from milescli.rollout.rewards import REWARDS, load_rewards, needs_label


@pytest.mark.parametrize("name", list(REWARDS.builtin))
def test_every_built_in_reward_bears_the_contract(name: str) -> None:
    rewards = check_reward(load_rewards(Rollout(reward=name))[name])
    assert set(rewards) <= {0.0, 1.0}
    assert rewards[1:3] == [0.0, 0.0]
    assert needs_label(Rollout(reward=name))


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
