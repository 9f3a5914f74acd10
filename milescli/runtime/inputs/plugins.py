"""Loads and checks the plug-ins that a recipe names, before a device is taken. Built-in ones are
known to fit, so only their names are looked up, unless they depend on other settings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from operator import attrgetter

from milescli.core.errors import RecipeError
from milescli.core.plug_points import (
    AGENTS,
    BEFORE_LOG_PROBS,
    EVALUATIONS,
    GENERATIONS,
    POINTS,
    ROWS,
)
from milescli.core.registry import PlugPoint
from milescli.recipe.schema import Recipe, Rollout

_OF_TRAINER = tuple(
    point for point in POINTS if point.runs_in == "rank" or point.key.startswith("train.")
)
"""Plug-ins whose modules import torch."""
_OF_DRIVER = tuple(
    point
    for point in POINTS
    if point is EVALUATIONS
    or (point.runs_in == "driver" and point not in _OF_TRAINER and point is not ROWS)
)
_ON_RANKS_ALWAYS = ("weights", "model", "train.optimizer.rule")
"""Keys of plug-ins that ranks call for every objective."""


def load_plugins(recipe: Recipe) -> None:
    """Load the recipe's plug-ins; those of the trainer only if one of them is the user's, or may
    need a model that the run does not load. Raises RecipeError if one cannot be loaded, does not
    have the signature of its kind, or needs a model that the run does not load."""
    check_plugins_quickly(recipe)
    has_own = any(name not in point.builtin for point, name in _named(recipe, _OF_TRAINER))
    if has_own or recipe.train.reference is False:
        load_train_plugins(recipe)


def check_plugins_quickly(recipe: Recipe) -> None:
    """Check the plug-ins of the driver, and whether the names of those of the trainer's ranks are
    known. Takes no time. Raises as `load_plugins`."""
    _check_rewards(recipe)
    _check_rollout(recipe.rollout)
    for point, name in _named(recipe, _OF_DRIVER):
        if name not in point.builtin:
            point.resolve(name)
    for point, name in _named(recipe, _OF_TRAINER):
        if point is BEFORE_LOG_PROBS:
            point.resolve(name)
        point.path_of(name)


def load_train_plugins(recipe: Recipe) -> None:
    """Load the plug-ins of the trainer's ranks; imports torch for them."""
    from milescli.train.objectives import load_objective
    from milescli.train.streams import Stream

    for point, name in _named(recipe, _OF_TRAINER):
        if point.key.startswith(_ON_RANKS_ALWAYS) and name not in point.builtin:
            point.resolve(name)
    name = recipe.train.objective
    objective = load_objective(name, recipe)
    if Stream.REFERENCE in objective.needs and not recipe.keeps_reference:
        raise RecipeError(
            f"the objective `{name}` needs a reference",
            why="the recipe keeps no reference: `train.kl_coef` is 0 and `train.reference` is "
            + ("not set" if recipe.train.reference is None else "false"),
            fix="--set train.reference=true",
        )


def _named(recipe: Recipe, points: tuple[PlugPoint, ...]) -> Iterator[tuple[PlugPoint, str]]:
    """Yield each plug point for which the recipe names a plug-in, and that name."""
    for point in points:
        name = attrgetter(point.key)(recipe)
        if name is not None and name != point.off:
            yield point, name


def _check_rewards(recipe: Recipe) -> None:
    from milescli.rollout.rewards import load_all_rewards
    from milescli.runtime.inputs.data_files import rollouts_of

    for rollout in rollouts_of(recipe):
        load_all_rewards(rollout)


def _check_rollout(rollout: Rollout) -> None:
    GENERATIONS.path_of(rollout.generation)
    has_settings = inspect.isclass(AGENTS.resolve(rollout.agent))
    has_own = rollout.agent not in AGENTS.builtin or rollout.generation not in GENERATIONS.builtin
    if has_settings or has_own or rollout.tools:
        from milescli.rollout.episode.agents import tool_schemas
        from milescli.rollout.episode.episode import load_agent

        load_agent(rollout)
        tool_schemas(rollout)
    if rollout.mcp:
        from milescli.agents.mcp_tools import require_package

        require_package(rollout)
    if {rollout.tool_parser, rollout.reasoning_parser} - {"auto", "none"}:
        from milescli.backends.sglang.client.parsers import check_parsers

        check_parsers(rollout)
