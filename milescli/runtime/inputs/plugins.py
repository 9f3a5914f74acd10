"""The plug-ins that a recipe names, resolved and checked before a device is taken."""

from __future__ import annotations

from milescli.agents.mcp_tools import require_package
from milescli.backends.megatron.layer_specs import LAYER_SPECS
from milescli.backends.sglang.client.parsers import check_parsers
from milescli.core.errors import RecipeError
from milescli.recipe.schema import Recipe
from milescli.rollout.collect.curriculum import load_curriculum
from milescli.rollout.collect.filters import load_filter
from milescli.rollout.collect.sample_filters import load_sample_filter
from milescli.rollout.collect.selection import load_selection
from milescli.rollout.collect.shaping import load_shaping
from milescli.rollout.episode.agents import tool_schemas
from milescli.rollout.episode.episode import load_agent
from milescli.rollout.evaluation.functions import load_evaluation
from milescli.rollout.evaluation.metrics import load_metrics
from milescli.rollout.rewards import load_all_rewards
from milescli.runtime.recording.user_hooks import UserHooks
from milescli.train.advantages import ADVANTAGES
from milescli.train.aggregation import AGGREGATIONS
from milescli.train.corrections import CORRECTIONS, NONE
from milescli.train.credits import CREDITS
from milescli.train.objectives import OBJECTIVES, load_objective
from milescli.train.optimizers import RULES, SCHEDULES
from milescli.train.rank_hooks import load_before_log_probs
from milescli.train.streams import Stream
from milescli.train.surrogates import SURROGATES
from milescli.weights.channels import AUTO, CHANNELS
from milescli.weights.formats import FORMATS


def load_plugins(recipe: Recipe) -> None:
    """Load the recipe's plug-ins. Raises RecipeError where one cannot be had, does not have the
    signature of its kind, or needs a model that the run does not keep."""
    check_at_once(recipe)
    load_train_plugins(recipe)


def check_at_once(recipe: Recipe) -> None:
    """Check what takes no time: the plug-ins of the driver, and whether those of the trainer's
    ranks have a name that is known. Raises as `load_plugins`."""
    load_all_rewards(recipe.rollout)
    load_agent(recipe.rollout)
    tool_schemas(recipe.rollout)
    require_package(recipe.rollout)
    check_parsers(recipe.rollout)
    load_filter(recipe.rollout.filter)
    load_sample_filter(recipe.rollout.sample_filter)
    load_shaping(recipe.rollout.shaping)
    load_selection(recipe.rollout.selection)
    load_curriculum(recipe.data.curriculum)
    load_metrics(recipe.eval.metrics)
    load_evaluation(recipe.eval)
    UserHooks(recipe)
    for registry in (OBJECTIVES, ADVANTAGES, CREDITS, SURROGATES, AGGREGATIONS):
        registry.path_of(getattr(recipe.train, registry.kind), key=f"train.{registry.kind}")
    RULES.path_of(recipe.train.optimizer.rule, key="train.optimizer.rule")
    FORMATS.path_of(recipe.weights.format, key="weights.format")
    LAYER_SPECS.path_of(recipe.model.layer_spec, key="model.layer_spec")
    load_before_log_probs(recipe.train.before_log_probs)
    SCHEDULES.path_of(recipe.train.optimizer.schedule, key="train.optimizer.schedule")
    if recipe.weights.channel != AUTO:
        CHANNELS.path_of(recipe.weights.channel, key="weights.channel")
    if recipe.train.correction.kind != NONE:
        CORRECTIONS.path_of(recipe.train.correction.kind, key="train.correction.kind")


def load_train_plugins(recipe: Recipe) -> None:
    """Load the plug-ins of the trainer's ranks; imports torch for them."""
    for registry, key, name in (
        (CHANNELS, "weights.channel", recipe.weights.channel),
        (FORMATS, "weights.format", recipe.weights.format),
        (LAYER_SPECS, "model.layer_spec", recipe.model.layer_spec),
        (RULES, "train.optimizer.rule", recipe.train.optimizer.rule),
    ):
        if ":" in name:
            registry.resolve(name, key=key)
    name = recipe.train.objective
    objective = load_objective(name, recipe)
    if Stream.REFERENCE in objective.needs and not recipe.keeps_reference:
        raise RecipeError(
            f"the objective `{name}` needs a reference",
            why="the recipe keeps none: `train.kl_coef` is 0 and `train.reference` is not set",
            fix="--set train.reference=true",
        )
