"""Implements `rollout.agent=verifiers`: an agent whose episodes the package verifiers plays. Its
environment calls the policy over HTTP and returns the reward; it runs in a virtual environment of
its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from milescli.agents.foreign.host import ForeignHost
from milescli.agents.foreign.packages import package_named
from milescli.agents.foreign.playing import host_of, play_episode, rows_of, without_rows
from milescli.core.types import Prompt
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Outcome, Session


class VerifiersAgent:
    """Implements milescli.rollout.base.Agent: an episode of `rollout.verifiers`. A row's label is
    the task, as `task:verifiers` writes it, or its number in the taskset."""

    def __init__(self, settings: Rollout) -> None:
        """Set up the host. Raises MachineError if verifiers is not installed."""
        self.host = host_for(settings)
        self.host.package.require(needed_by="the agent `verifiers`")
        self._timeout_s = settings.verifiers.episode_timeout_s

    async def __call__(self, prompt: Prompt, session: Session) -> Outcome:
        """Play one episode; the environment returns the reward and metrics."""
        return await play_episode(self.host, prompt, session, timeout_s=self._timeout_s)


def host_for(settings: Rollout) -> ForeignHost:
    """Return the host that plays the recipe's environment; its process is not started yet."""
    config = settings.verifiers
    start = {
        "environment": config.environment,
        "arguments": config.arguments,
        "options": config.options,
        "max_turns": settings.max_turns,
    }
    return host_of(ForeignHost(package_named("verifiers"), start))


def tasks(settings: Rollout) -> list[dict[str, Any]]:
    """Return the first `rollout.verifiers.num_tasks` tasks as rows. Raises RecipeError."""
    host = host_for(settings)
    host.package.require(needed_by="`task:verifiers`")
    return rows_of(host, "tasks", count=settings.verifiers.num_tasks)


def rows(*, seed: int) -> Iterator[Mapping[str, Any]]:
    """Raise RecipeError: the taskset is only known from a recipe."""
    raise without_rows("verifiers")
