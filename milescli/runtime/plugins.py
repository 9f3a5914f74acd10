"""The plug-ins that a recipe names, resolved and checked before a device is taken."""

from __future__ import annotations

from milescli.core.errors import RecipeError
from milescli.recipe.schema import Recipe
from milescli.rollout.episode import load_agent
from milescli.rollout.filters import load_filter
from milescli.rollout.metrics import load_metrics
from milescli.rollout.rewards import load_reward
from milescli.rollout.sample_filters import load_sample_filter
from milescli.rollout.shaping import load_shaping
from milescli.runtime.user_hooks import UserHooks
from milescli.train.advantages import ADVANTAGES
from milescli.train.aggregation import AGGREGATIONS
from milescli.train.corrections import CORRECTIONS, NONE
from milescli.train.credits import CREDITS
from milescli.train.objectives import OBJECTIVES, load_objective
from milescli.train.schedule import SCHEDULES
from milescli.train.streams import Stream
from milescli.train.surrogates import SURROGATES
from milescli.weights.channels import AUTO, CHANNELS


def load_plugins(recipe: Recipe) -> None:
    """Raises RecipeError where one cannot be had, does not have the signature of its kind, or needs
    a model that the run does not keep."""
    check_at_once(recipe)
    load_train_plugins(recipe)


def check_at_once(recipe: Recipe) -> None:
    """What takes no time: those of the driver, and whether those of the trainer's ranks have a name
    that is known. Raises as `load_plugins`."""
    load_reward(recipe.rollout)
    load_agent(recipe.rollout)
    load_filter(recipe.rollout.filter)
    load_sample_filter(recipe.rollout.sample_filter)
    load_shaping(recipe.rollout.shaping)
    load_metrics(recipe.eval.metrics)
    UserHooks(recipe)
    for registry in (OBJECTIVES, ADVANTAGES, CREDITS, SURROGATES, AGGREGATIONS):
        registry.path_of(getattr(recipe.train, registry.kind), key=f"train.{registry.kind}")
    SCHEDULES.path_of(recipe.train.optimizer.schedule, key="train.optimizer.schedule")
    if recipe.weights.channel != AUTO:
        CHANNELS.path_of(recipe.weights.channel, key="weights.channel")
    if recipe.train.correction.kind != NONE:
        CORRECTIONS.path_of(recipe.train.correction.kind, key="train.correction.kind")


def load_train_plugins(recipe: Recipe) -> None:
    """Those of the trainer's ranks; torch is imported for them."""
    if ":" in recipe.weights.channel:
        CHANNELS.resolve(recipe.weights.channel, key="weights.channel")
    name = recipe.train.objective
    objective = load_objective(name, recipe)
    if Stream.REFERENCE in objective.needs and not recipe.keeps_reference:
        raise RecipeError(
            f"the objective `{name}` needs a reference",
            why="the recipe keeps none: `train.kl_coef` is 0 and `train.reference` is not set",
            fix="--set train.reference=true",
        )
