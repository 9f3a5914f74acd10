"""Settings of agents whose episodes are played by another package, in a virtual environment of its
own: sections of `rollout`. Part of the schema."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from milescli.recipe.section import Positive, PositiveFloat, Section

FOREIGN = ("verifiers",)
"""Built-in agents that have another package play the episode, which says the reward too."""


class VerifiersSettings(Section):
    """An environment of verifiers."""

    environment: str | None = None
    """Its taskset, by the name of the package that holds it (`my-tasks`, `owner/my-tasks`), which
    is installed beside verifiers, or lies where the run is begun."""
    arguments: dict[str, Any] = Field(default={})
    """Of the taskset: what verifiers' `[env.taskset]` takes."""
    options: dict[str, Any] = Field(default={})
    """The rest of verifiers' `[env]`: `{id: best-of-n, agent: {max_turns: 4, harness: {id: bash}}}`.
    A seat that says nothing plays on this machine, by a harness that chats and calls tools."""
    num_tasks: Positive = 8192
    """Of `task:verifiers`, which are the first of the taskset: some have no end."""
    episode_timeout_s: PositiveFloat = 600.0
    """Of one episode, its scoring included."""
