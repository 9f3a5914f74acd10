"""Keys that a recipe would send over the network for all to read: one warning for each place, told
once where the recipe is read. Pure; called by `check`."""

from __future__ import annotations

from milescli.recipe.check_url import HasKey, doubt_about_key
from milescli.recipe.schema import Recipe


def doubts_about_keys(recipe: Recipe) -> list[str]:
    """Of everybody who is asked with a key."""
    rollout, distill = recipe.rollout, recipe.train.distill
    asked: list[tuple[str | None, str, HasKey]] = [
        (rollout.judge.url, "rollout.judge", rollout.judge),
        (rollout.remote_reward.url, "rollout.remote_reward", rollout.remote_reward),
        (rollout.user.endpoint.url, "rollout.user.endpoint", rollout.user.endpoint),
        (rollout.search.url, "rollout.search", rollout.search),
    ]
    asked += [(one.url, f"rollout.mcp.{name}", one) for name, one in rollout.mcp.items()]
    asked += [
        (role.endpoint.url, f"rollout.roles.{name}.endpoint", role.endpoint)
        for name, role in rollout.roles.items()
        if role.endpoint is not None
    ]
    asked += [(each.url, "train.distill.server", distill.server) for each in recipe.teachers]
    doubts = [doubt_about_key(*each) for each in asked]
    return list(dict.fromkeys(doubt for doubt in doubts if doubt))
