"""Implements `rollout.agent=harbor`: an agent whose episodes are trials of harbor. A program of
harbor solves a task in a container and calls the policy over HTTP; the task's own verifier returns
the reward."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from milescli.agents.foreign.host import ForeignHost
from milescli.agents.foreign.packages import package_named
from milescli.agents.foreign.playing import host_of, play_episode, rows_of, without_rows
from milescli.core.types import Prompt
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Outcome, Session


class HarborAgent:
    """Implements milescli.rollout.base.Agent: a trial of a task in `rollout.harbor.tasks`, which a
    row's label names by its folder. Belongs to one event loop."""

    def __init__(self, settings: Rollout) -> None:
        """Set up the host. Raises MachineError if harbor is not installed."""
        self.host = host_for(settings)
        self.host.package.require(needed_by="the agent `harbor`")
        self._timeout_s = settings.harbor.episode_timeout_s
        self._room = asyncio.Semaphore(settings.harbor.num_at_once)

    async def __call__(self, prompt: Prompt, session: Session) -> Outcome:
        """Run a trial once the limit of concurrent trials allows it. The text of the Outcome is the
        policy's last turn."""
        async with self._room:
            outcome = await play_episode(self.host, prompt, session, timeout_s=self._timeout_s)
        return replace(outcome, text=session.turns[-1].text if session.turns else "")


def host_for(settings: Rollout) -> ForeignHost:
    """Return the host that runs the recipe's trials; its process is not started yet."""
    config = settings.harbor
    start = {
        "tasks": str(Path(config.tasks or "").expanduser().absolute()),
        "agent": config.agent,
        "environment": config.environment,
        "agent_options": config.agent_options,
        "environment_options": config.environment_options,
        "reward": config.reward,
    }
    return host_of(ForeignHost(package_named("harbor"), start))


def tasks(settings: Rollout) -> list[dict[str, Any]]:
    """Return the tasks of `rollout.harbor.tasks` as rows. Raises RecipeError."""
    host = host_for(settings)
    host.package.require(needed_by="`task:harbor`")
    return rows_of(host, "tasks", count=settings.harbor.num_tasks)


def rows(*, seed: int) -> Iterator[Mapping[str, Any]]:
    """Raise RecipeError: the folder with the tasks is only known from a recipe."""
    raise without_rows("harbor")
