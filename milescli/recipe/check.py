"""Applies all rules of a recipe in order, and raises the first broken one. Pure: no file, no
machine. The rules themselves are next to the sections that they are about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from milescli.recipe import (
    agents,
    alerts,
    data,
    distill,
    evaluation,
    lora,
    machine,
    model,
    rewards,
    rollout,
    speculative,
    store_url,
    train,
)
from milescli.recipe.requests import HasKey, unencrypted_key_warning
from milescli.recipe.schema import Recipe
from milescli.recipe.section import Rule, refuse


def check(recipe: Recipe, origins: Mapping[str, object]) -> list[str]:
    """Return warnings about legal settings that are probably not intended. Raises RecipeError for
    the first broken rule; its message names who set what, from `origins`."""
    refuse(rules(recipe, origins))
    optimizer = recipe.train.optimizer
    is_eval_trained = recipe.data.eval is not None and recipe.data.eval == recipe.data.prompts
    is_min_lr_unused = optimizer.min_lr > 0 and optimizer.schedule == "constant"
    return [
        *["`data.eval` is `data.prompts`: the accuracy is of prompts that were trained on"]
        * is_eval_trained,
        *["`train.optimizer.min_lr` has no effect: the schedule is constant"] * is_min_lr_unused,
        *agents.find_warnings(recipe),
        *lora.find_warnings(recipe),
        *unencrypted_key_warnings(recipe),
        *train.algorithm_warnings(recipe),
        *rollout.order_warnings(recipe.rollout),
    ]


def rules(recipe: Recipe, origins: Mapping[str, object]) -> Iterator[Rule]:
    """Yield every rule in the order in which it applies."""
    yield from model.rules(recipe, origins)
    yield from data.rules(recipe)
    yield from rollout.rules(recipe)
    yield from evaluation.rules(recipe, origins)
    yield from train.rules(recipe)
    yield from machine.rules(recipe, origins)
    yield from rewards.rules(recipe)
    yield from agents.rules(recipe)
    yield from data.row_rules(recipe)
    yield from distill.rules(recipe)
    yield from speculative.rules(recipe)
    yield from train.algorithm_rules(recipe)
    yield from rollout.order_rules(recipe.rollout)
    yield from lora.rules(recipe)
    yield from speculative.mtp_rules(recipe)
    yield from speculative.draft_rules(recipe)
    yield from machine.tracker_rules(recipe.run)
    yield from alerts.rules(recipe.run)
    yield from store_url.rules(recipe)


def unencrypted_key_warnings(recipe: Recipe) -> list[str]:
    """Return a warning for each API key that would be sent over the network in clear text."""
    settings, server = recipe.rollout, recipe.train.distill.server
    with_keys: list[tuple[str | None, str, HasKey]] = [
        (settings.judge.url, "rollout.judge", settings.judge),
        (settings.remote_reward.url, "rollout.remote_reward", settings.remote_reward),
        (settings.user.endpoint.url, "rollout.user.endpoint", settings.user.endpoint),
        (settings.search.url, "rollout.search", settings.search),
        *((one.url, f"rollout.mcp.{name}", one) for name, one in settings.mcp.items()),
        *(
            (role.endpoint.url, f"rollout.roles.{name}.endpoint", role.endpoint)
            for name, role in settings.roles.items()
            if role.endpoint is not None
        ),
        *((teacher.url, "train.distill.server", server) for teacher in recipe.teachers),
    ]
    found = [unencrypted_key_warning(*each) for each in with_keys]
    return list(dict.fromkeys(warning for warning in found if warning))
