"""Settings of agents whose episodes are played by another package, in a virtual environment of its
own: sections of `rollout`. Part of the schema."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from milescli.recipe.section import Positive, PositiveFloat, Section

FOREIGN = ("verifiers", "harbor")
"""Built-in agents that have another package play the episode, which says the reward too."""


class VerifiersSettings(Section):
    """An environment of verifiers."""

    environment: str | None = None
    """Its taskset, by the name of the package that holds it (`my-tasks`, `owner/my-tasks`), which
    is installed beside verifiers, or lies where the run is begun."""
    arguments: dict[str, Any] = Field(default={})
    """Of the taskset: what verifiers' `[env.taskset]` takes."""
    options: dict[str, Any] = Field(default={})
    """The rest of verifiers' `[env]`: `{id: best-of-n, agent: {harness: {id: bash}}}`.
    A seat that says nothing plays on this machine, by a harness that chats and calls tools."""
    num_tasks: Positive = 8192
    """Of `task:verifiers`, which are the first of the taskset: some have no end."""
    episode_timeout_s: PositiveFloat = 600.0
    """Of one episode, its scoring included."""


class HarborSettings(Section):
    """Tasks of harbor, each worked at in a container of its own."""

    tasks: str | None = None
    """A folder with a task (task.toml, instruction.md, environment, tests), or of such folders."""
    agent: str = "terminus-2"
    """Who works at them: a name that harbor knows, or `mypkg.agents:Mine`, of harbor's BaseAgent.
    It has to reach the policy on this machine's loopback, as those do that run beside harbor."""
    agent_options: dict[str, Any] = Field(default={})
    """What harbor's settings of an agent take: `{kwargs: {max_turns: 20}}`."""
    environment: str = "docker"
    """Where: a kind that harbor knows, or `mypkg.places:Mine`, of harbor's BaseEnvironment."""
    environment_options: dict[str, Any] = Field(default={})
    """What harbor's settings of an environment take: `{override_memory_mb: 2048}`."""
    reward: str | None = None
    """Which of the numbers that a task's verifier says; null: `reward`, or the only one."""
    num_at_once: Positive = 8
    """Trials; further episodes wait for one to end."""
    num_tasks: Positive = 8192
    """Of `task:harbor`."""
    episode_timeout_s: PositiveFloat = 3600.0
    """Of one trial, from its container's begin to its verifier's end."""
