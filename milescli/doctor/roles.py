"""Checks the models of a recipe other than the one that it trains: whether they exist, and their
shapes. Uses the code that a launch runs; downloads no weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from milescli.doctor.finding import Finding, ok
from milescli.models import ModelFacts
from milescli.models.score_head import with_score_head
from milescli.recipe.model import Model
from milescli.recipe.schema import Recipe


def check_roles(recipe: Recipe) -> list[Finding]:
    """List the models of the recipe's roles. Raises what a launch would raise."""
    from milescli.runtime.inputs.auxiliary_models import (
        policy_paths,
        reward_facts,
        served_teachers,
        teacher_facts,
    )

    models = []
    if recipe.keeps_reference or recipe.caches_reference:
        models.append("reference: the policy's initial weights")
    if (critic := critic_facts(recipe)) is not None:
        models.append(f"critic: {recipe.train.critic.path or 'of the policy'}, {_shape(critic)}")
    for teacher, facts in zip(recipe.local_teachers, teacher_facts(recipe), strict=True):
        models.append(f"teacher: {teacher.path}, {_shape(facts)}")
    if (served := served_teachers(recipe)) is not None:
        names = asyncio.run(served.models())
        models += [f"teacher: {name}, served" for name in names]
    if (reward := reward_facts(recipe)) is not None:
        models.append(f"reward model: {recipe.rollout.reward_model.path}, {_shape(reward)}")
    for path in policy_paths(recipe):
        models.append(f"plays a role: {path.path}, {_shape(path.facts(recipe.longest_sequence))}")
    return ok("roles", "; ".join(models) or "no model besides the policy")


def critic_facts(recipe: Recipe) -> ModelFacts | None:
    """Return the facts of the critic, or None if the recipe has none."""
    from milescli.runtime.inputs.model_facts import facts_of_recipe

    if not recipe.has_critic:
        return None
    path = recipe.train.critic.path
    return with_score_head(facts_of_recipe(recipe.model if path is None else Model(path=path)))


def repos_of_roles(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (name on the hub, recipe key) of the models that are not on this disk."""
    from milescli.runtime.inputs.auxiliary_models import policy_paths, reward_path, teacher_paths

    models = [*teacher_paths(recipe), *filter(None, [reward_path(recipe)]), *policy_paths(recipe)]
    yield from ((model.path, model.key) for model in models if model.is_on_hub)
    critic = recipe.train.critic.path if recipe.has_critic else None
    if critic is not None and not Path(critic).expanduser().is_dir():
        yield critic, "train.critic.path"


def _shape(facts: ModelFacts) -> str:
    return f"{facts.family} of {facts.num_layers} layers, width {facts.hidden_size}"
