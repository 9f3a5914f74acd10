"""Chooses which processes ask the engines, score what they sample and keep it until it is trained
on: the driver, or several of their own. Pure; called by `make`."""

from __future__ import annotations

from milescli.core.errors import FitError
from milescli.core.plug_points import (
    ADVANTAGES,
    AGGREGATIONS,
    CURRICULA,
    FILTERS,
    GENERATIONS,
    SAMPLE_FILTERS,
    SELECTIONS,
    SHAPINGS,
    TOOLS,
)
from milescli.models.facts import ModelFacts
from milescli.plan.types import EngineLayout, Log
from milescli.recipe.schema import Recipe
from milescli.recipe.train import OF_TURNS

ENGINES_PER_COLLECTOR = 256
"""One process asks as many engines: a sample takes 0.3 to 0.7 ms of its core, and 16,384 samples in
a step of a minute are then a fifth of it for each of four."""
_PLAYED_ANYWHERE = ("single_turn", "tools")
"""Agents that need nothing of the driver."""


def choose_collectors(recipe: Recipe, facts: ModelFacts, engines: EngineLayout, log: Log) -> int:
    """Return the number of processes that collect; 0: the driver. Raises FitError where the recipe
    wants some and the run cannot have them."""
    wanted = recipe.machine.collectors
    num = -(-engines.num // ENGINES_PER_COLLECTOR) if wanted is None else wanted
    if not engines.num or (wanted is None and num == 1) or num == 0:
        return 0
    why = why_in_driver(recipe, facts)
    if why is not None and wanted:
        raise FitError(
            "this run collects its samples in the driver",
            why=f"machine.collectors is {wanted}, but {why}",
            fix="--set machine.collectors=null",
        )
    if why is not None:
        log.note("machine.collectors", 0, f"{num} would serve {engines.num} engines, but {why}")
        return 0
    reason = (
        f"one for each {ENGINES_PER_COLLECTOR} of {engines.num} engines"
        if wanted is None
        else "pinned by `machine.collectors`"
    )
    log.note("machine.collectors", num, reason)
    return num


def why_in_driver(recipe: Recipe, facts: ModelFacts) -> str | None:
    """Return why other processes cannot collect for this recipe; None: they can."""
    rollout, train = recipe.rollout, recipe.train
    hooks = [
        name
        for name in ("all_samples", "before_step", "after_step")
        if getattr(recipe.run.hooks, name) is not None
    ]
    own = {
        "rollout.generation": rollout.generation in GENERATIONS.builtin,
        "rollout.filter": rollout.filter in FILTERS.builtin,
        "rollout.sample_filter": rollout.sample_filter in SAMPLE_FILTERS.builtin,
        "rollout.shaping": rollout.shaping in SHAPINGS.builtin,
        "rollout.selection": rollout.selection in SELECTIONS.builtin,
        "data.curriculum": recipe.data.curriculum in CURRICULA.builtin,
        "train.advantage": train.advantage in ADVANTAGES.builtin,
        "train.aggregation": train.aggregation in AGGREGATIONS.builtin,
    }
    reasons = {
        f"an agent (`{rollout.agent}`) plays its episodes beside the driver": rollout.agent
        not in _PLAYED_ANYWHERE
        or not all(name in TOOLS.builtin for name in rollout.tools),
        "servers of `rollout.mcp` run beside the driver": bool(rollout.mcp),
        f"the credit `{train.credit}` takes rewards of single turns": train.credit != "sample"
        and rollout.agent != "single_turn",
        f"the objective `{train.objective}` makes its sequences there": train.objective != "policy",
        f"`train.advantage={train.advantage}` reads tokens": train.advantage in OF_TURNS,
        "several adapters share the engines": bool(recipe.adapters),
        "the reward model is asked there": recipe.asks_reward_model,
        f"`run.hooks.{'`, `'.join(hooks)}` is given the samples": bool(hooks),
        **{f"`{key}` is your own and is given the samples": not ours for key, ours in own.items()},
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)
