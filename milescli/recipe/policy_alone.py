"""A recipe without the models that it asks beside the policy: for who reads its data and learns
nothing. Pure."""

from __future__ import annotations

from collections.abc import Callable

from milescli.recipe.distill import NO_REWARD, Distill
from milescli.recipe.schema import Recipe

REWARD_MODEL = "reward_model"
"""The name of the reward that a model gives, and of the objective that makes one."""


def untaught(recipe: Recipe) -> Recipe:
    """Without its teachers."""
    return recipe.model_copy(
        update={"train": recipe.train.model_copy(update={"distill": Distill()})}
    )


def unscored(recipe: Recipe) -> Recipe:
    """Without any reward."""
    return _with_rewards(recipe, lambda reward: NO_REWARD)


def policy_alone(recipe: Recipe) -> Recipe:
    """The same data, read for the policy: without teachers, critic and reward model; other rewards
    stay, and so what they ask of a label."""
    objective = recipe.train.objective
    changes = {
        "credit": "sample",
        "objective": "preference" if objective == REWARD_MODEL else objective,
    }
    recipe = _with_rewards(untaught(recipe), _unasked)
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})


def _with_rewards(recipe: Recipe, changed: Callable[[object], object]) -> Recipe:
    """`changed`: a reward, or rewards with weights -> the same."""
    data, rollout = recipe.data, recipe.rollout
    mix = [
        source.model_copy(update={"reward": source.reward and changed(source.reward)})
        for source in data.mix or []
    ]
    roles = {
        name: role.model_copy(update={"reward": role.reward and changed(role.reward)})
        for name, role in rollout.roles.items()
    }
    changes = {"reward": changed(rollout.reward), "roles": roles}
    return recipe.model_copy(
        update={
            "rollout": rollout.model_copy(update=changes),
            "data": data.model_copy(update={"mix": mix or None}),
        }
    )


def _unasked(reward: object) -> object:
    """Without the part that a reward model gives."""
    if isinstance(reward, dict):
        others = {name: weight for name, weight in reward.items() if name != REWARD_MODEL}
        return others or NO_REWARD
    return NO_REWARD if reward == REWARD_MODEL else reward
