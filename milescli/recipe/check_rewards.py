"""Rules of a recipe's rewards: weights, and the settings of those that it names. Pure; called by
`check`."""

from __future__ import annotations

import re

from milescli.core.errors import RecipeError
from milescli.recipe.check_url import check_url
from milescli.recipe.schema import Recipe, Rollout

_EXAMPLE_URL = "http://127.0.0.1:8000/v1"


def check_rewards(recipe: Recipe) -> None:
    """Raises RecipeError where the recipe's rewards cannot be what is meant."""
    rollout = recipe.rollout
    _weights(rollout)
    if "length" in rollout.reward_names:
        _length(rollout)
    if "judge" in rollout.reward_names:
        _judge(rollout)
    if recipe.asks_reward_model and not rollout.reward_model.path:
        raise RecipeError(
            "the reward `reward_model` has no model",
            why="`rollout.reward_model.path` says which one scores",
            fix=[
                "--set rollout.reward_model.path=runs/NAME   # of train.objective=reward_model",
                "miles launch --recipe quickstart-reward-model   # to train one",
            ],
        )
    if "remote" in rollout.reward_names:
        _url(rollout.remote_reward.url, "rollout.remote_reward", reward="remote")


def _weights(rollout: Rollout) -> None:
    if not rollout.reward_weights:
        raise RecipeError(
            "`rollout.reward` names no reward",
            why="an empty mapping scores nothing",
            fix="--set rollout.reward=math",
        )
    if not any(rollout.reward_weights.values()):
        raise RecipeError(
            "every part of `rollout.reward` weighs nothing",
            why=f"{rollout.reward_name}: all samples would have the reward 0",
            fix=f"--set 'rollout.reward={{{next(iter(rollout.reward_weights))}: 1.0}}'",
        )


def _length(rollout: Rollout) -> None:
    target, limit = rollout.length_bounds
    longest = rollout.max_response_tokens
    if target >= min(limit, longest):
        raise RecipeError(
            f"the length penalty cannot begin at {target} tokens",
            why=f"it is whole at {limit}, and a response has {longest} at most "
            "(`rollout.max_response_tokens`): there is no room to rise",
            fix=f"--set rollout.length.target_tokens={max(1, min(limit, longest) // 2)}",
        )


def _judge(rollout: Rollout) -> None:
    judge = rollout.judge
    _url(judge.url, "rollout.judge", reward="judge")
    if not judge.model:
        raise RecipeError(
            "the judge has no model",
            why="`rollout.judge.model` says which of the endpoint's models scores",
            fix="--set rollout.judge.model=Qwen/Qwen3-32B",
        )
    try:
        num_groups = re.compile(judge.parse).groups
    except re.error as error:
        raise RecipeError(
            f"`rollout.judge.parse` cannot be `{judge.parse}`",
            why=f"it is no regular expression: {error}",
            fix=r"--set 'rollout.judge.parse=Score: (\d+)'",
        ) from None
    if num_groups < 1:
        raise RecipeError(
            f"`rollout.judge.parse` cannot be `{judge.parse}`",
            why="its first group is the score, and it has none",
            fix=r"--set 'rollout.judge.parse=Score: (\d+)'",
        )


def _url(url: str | None, section: str, *, reward: str) -> None:
    if not url:
        raise RecipeError(
            f"the reward `{reward}` has no address",
            why=f"`{section}.url` is not set",
            fix=f"--set {section}.url={_EXAMPLE_URL}",
        )
    check_url(url, key=f"{section}.url", section=section, example=_EXAMPLE_URL)
