"""An agent whose episodes are trials of harbor: `rollout.agent=harbor`. A program of harbor's works
at a task in a container, asks the policy over HTTP, and the task's own verifier says the reward."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from milescli.agents.foreign.host import ForeignHost
from milescli.agents.foreign.packages import package_named
from milescli.agents.foreign.playing import host_of, played, rows_of, without_rows
from milescli.core.types import Prompt
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Outcome, Session


class HarborAgent:
    """Implements milescli.rollout.base.Agent: a trial of a task in `rollout.harbor.tasks`, which a
    row's label names by its folder. Belongs to one event loop."""

    def __init__(self, settings: Rollout) -> None:
        """Raises MachineError where harbor is not installed."""
        self.host = host_for(settings)
        self.host.package.require(asked_by="the agent `harbor`")
        self._timeout_s = settings.harbor.episode_timeout_s
        self._room = asyncio.Semaphore(settings.harbor.num_at_once)

    async def __call__(self, prompt: Prompt, session: Session) -> Outcome:
        """Where there is room for a trial. The text is what the policy said last."""
        async with self._room:
            outcome = await played(self.host, prompt, session, timeout_s=self._timeout_s)
        return replace(outcome, text=session.turns[-1].text if session.turns else "")


def host_for(settings: Rollout) -> ForeignHost:
    """The process that runs the recipe's trials; it is not begun yet."""
    said = settings.harbor
    start = {
        "tasks": str(Path(said.tasks or "").expanduser().absolute()),
        "agent": said.agent,
        "environment": said.environment,
        "agent_options": said.agent_options,
        "environment_options": said.environment_options,
        "reward": said.reward,
    }
    return host_of(ForeignHost(package_named("harbor"), start))


def tasks(settings: Rollout) -> list[dict[str, Any]]:
    """Its tasks, as rows. Raises RecipeError."""
    host = host_for(settings)
    host.package.require(asked_by="`task:harbor`")
    return rows_of(host, "tasks", count=settings.harbor.num_tasks)


def rows(*, seed: int) -> Iterator[Mapping[str, Any]]:
    """Tasks of the recipe's folder; which that is, no seed says. Raises RecipeError."""
    raise without_rows("harbor")
