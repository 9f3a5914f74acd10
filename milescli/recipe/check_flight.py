"""Rules of rollout that runs while the trainer works: the order of groups, and what a change of the
weights does to what is running. Pure; called by `check`."""

from __future__ import annotations

from milescli.core.errors import RecipeError
from milescli.recipe.schema import Recipe


def check_flight(recipe: Recipe) -> None:
    """Raises RecipeError."""
    rollout = recipe.rollout
    if rollout.order != "done":
        return
    if rollout.max_staleness == 0:
        raise RecipeError(
            "`rollout.order=done` has no other groups to take",
            why="at `rollout.max_staleness` 0 a step's groups are all that is sampled before it",
            fix=["--set rollout.max_staleness=2", "--set rollout.order=prompts"],
        )
    if rollout.over_sampling > 1.0:
        raise RecipeError(
            f"`rollout.over_sampling={rollout.over_sampling:g}` would sample for nothing",
            why="with `rollout.order=done` further prompts are always in flight, and what a step "
            "does not take the next one does: stragglers hold nobody up, and nothing is given up "
            f"for it; `rollout.max_staleness` {rollout.max_staleness} says how many there are",
            fix=["--set rollout.over_sampling=1", "--set rollout.order=prompts"],
        )


def doubts_about_flight(recipe: Recipe) -> list[str]:
    """What has no effect."""
    rollout, doubts = recipe.rollout, list[str]()
    if rollout.on_update != "continue" and rollout.max_staleness == 0:
        doubts.append(
            f"`rollout.on_update={rollout.on_update}` has no effect: at `rollout.max_staleness` 0 "
            "nothing is running when new weights come"
        )
    if rollout.stale_groups != "wait" and rollout.order != "done":
        doubts.append(
            f"`rollout.stale_groups={rollout.stale_groups}` has no effect: in the order of the "
            "prompts no group becomes too old"
        )
    return doubts
