"""Models of a recipe beside the one that it trains: are they there, and what are they? By the code
that a launch runs; no weights are fetched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from milescli.doctor.finding import Finding, ok
from milescli.models import ModelFacts
from milescli.models.score_head import with_score_head
from milescli.recipe.check_distill import NO_REWARD
from milescli.recipe.model import Model
from milescli.recipe.schema import Recipe
from milescli.recipe.train import Distill

REWARD_MODEL = "reward_model"


def check_roles(recipe: Recipe) -> list[Finding]:
    """Raises what a launch would raise."""
    from milescli.runtime.reward_model import reward_facts
    from milescli.runtime.teachers import teacher_facts

    told = []
    if recipe.keeps_reference or recipe.caches_reference:
        told.append("reference: the policy's weights at the start")
    if (critic := critic_facts(recipe)) is not None:
        told.append(f"critic: {recipe.train.critic.path or 'of the policy'}, {_shape(critic)}")
    for teacher, facts in zip(recipe.teachers, teacher_facts(recipe), strict=True):
        told.append(f"teacher: {teacher.path}, {_shape(facts)}")
    if (reward := reward_facts(recipe)) is not None:
        told.append(f"reward model: {recipe.rollout.reward_model.path}, {_shape(reward)}")
    return ok("roles", "; ".join(told) or "no model beside the policy")


def critic_facts(recipe: Recipe) -> ModelFacts | None:
    """Of the critic; None: there is none."""
    from milescli.runtime.inputs import facts_of_recipe

    if not recipe.has_critic:
        return None
    path = recipe.train.critic.path
    return with_score_head(facts_of_recipe(recipe.model if path is None else Model(path=path)))


def repos_of_roles(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(name on the hub, key) of those that are not on this disk."""
    named = [(teacher.path, "train.distill.teachers") for teacher in recipe.teachers]
    if recipe.has_critic:
        named.append((recipe.train.critic.path or "", "train.critic.path"))
    if recipe.asks_reward_model:
        named.append((recipe.rollout.reward_model.path or "", "rollout.reward_model.path"))
    for path, key in named:
        if path.count("/") == 1 and not Path(path).expanduser().parent.is_dir():
            yield path, key


def without_roles(recipe: Recipe) -> Recipe:
    """The same data, read for the policy alone: the others' weights are not needed for it, nor are
    the policy's."""
    train, rollout, data = recipe.train, recipe.rollout, recipe.data
    objective = "preference" if train.objective == "reward_model" else train.objective
    changes = {"distill": Distill(), "credit": "sample", "objective": objective}
    mix = [
        source.model_copy(update={"reward": _unasked(source.reward)}) for source in data.mix or []
    ]
    return recipe.model_copy(
        update={
            "train": train.model_copy(update=changes),
            "rollout": rollout.model_copy(update={"reward": _unasked(rollout.reward)}),
            "data": data.model_copy(update={"mix": mix or None}),
        }
    )


def _unasked(reward: object) -> object:
    """Without the part that a reward model gives."""
    if isinstance(reward, dict):
        others = {name: weight for name, weight in reward.items() if name != REWARD_MODEL}
        return others or NO_REWARD
    return NO_REWARD if reward == REWARD_MODEL else reward


def _shape(facts: ModelFacts) -> str:
    return f"{facts.family} of {facts.num_layers} layers, width {facts.hidden_size}"
