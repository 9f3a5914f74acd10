"""What `miles env check` says of environments, of those that do what one must and of others."""

from __future__ import annotations

import pytest

from milescli.core.errors import RecipeError
from milescli.core.types import Prompt
from milescli.rollout.environment_contract import check_environment

HERE = "tests.agents.user_environments"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Forgets", "the same seed (0) and actions do not give the same: its reset says"),
        ("Rich", "and its `reward_range` is 0 to 0.5"),
        ("Leaks", "its episodes keep what they open"),
        ("Wrong", "not a Step"),
    ],
)
def test_what_an_environment_must_not_do_is_named(name: str, told: str) -> None:
    actions = ["none"] if name == "Wrong" else ["a", "bb"]
    with pytest.raises(RecipeError) as caught:
        check_environment(f"{HERE}:{name}", actions=actions)
    assert told in caught.value.why


def test_a_good_one_is_told_in_numbers() -> None:
    rows = [Prompt(index=seed, token_ids=[], text="p") for seed in range(5)]
    seen = check_environment(f"{HERE}:Count", settings={"length": 4}, rows=rows, actions=["ab"])
    assert (seen.num_episodes, seen.num_steps, seen.num_ended) == (5, 20, 5)
    assert seen.rewards == (8.0, 8.0) and seen.first == "begin 0"
