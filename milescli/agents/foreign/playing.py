"""Plays episodes in the process of another package: sends the request, and turns the reply into an
Outcome. Shared by all agents of such packages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from milescli.agents.foreign.host import ForeignHost
from milescli.core.errors import AgentError, RecipeError
from milescli.core.plug_points import AGENTS
from milescli.core.types import Prompt
from milescli.recipe.agents import PACKAGE_AGENTS
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Outcome, Session
from milescli.rollout.episode.agents import create_agent, is_built_in
from milescli.workers.worker import CallFailed

MODEL = "policy"
"""Name that the package gives to the model; a session serves one model only."""
_HOSTS: dict[str, ForeignHost] = {}
"""Package and start parameters -> host: training, evaluation and the rows share one process."""
ASK_TIMEOUT_S = 300.0
"""Time limit for listing the rows of a package."""


def host_of(host: ForeignHost) -> ForeignHost:
    """Return the host that this process uses for the same package and parameters; the first time,
    `host`."""
    return _HOSTS.setdefault(f"{host.package.name} {host.start!r}", host)


async def play_episode(
    host: ForeignHost, prompt: Prompt, session: Session, *, timeout_s: float
) -> Outcome:
    """Play one episode of the task that the prompt's label names. Raises AgentError with what the
    package raised, or CallFailed if the session may be the cause."""
    params = {
        "task": prompt.label,
        "base_url": session.base_url,
        "api_key": session.api_key,
        "model": MODEL,
    }
    try:
        reply = await host.call("play", params, timeout_s=timeout_s)
    except CallFailed as error:
        if getattr(session, "engine_failure", error) is not None:
            raise  # whose fault it is is known to who plays the episode
        raise AgentError(
            f"an episode of {host.package.name} failed",
            why=str(error),
            fix=f"fix the environment that `rollout.{host.package.name}` names",
        ) from None
    return outcome_of(reply, package=host.package.name)


def outcome_of(reply: Mapping[str, Any], *, package: str) -> Outcome:
    """Convert the reply into an Outcome. Raises AgentError for a number that is not finite."""
    numbers = {"reward": reply["reward"], **reply["figures"]}
    for name, value in numbers.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise AgentError(
                f"an episode of {package} has no `{name}`",
                why=f"it is {value!r}, not a finite number",
                fix="fix the rewards and metrics of its environment",
            )
    return Outcome(
        text=reply["text"],
        reward=float(reply["reward"]),
        is_cut=reply["is_cut"],
        figures={name: float(value) for name, value in reply["figures"].items()},
    )


def require_foreign_environment(rollout: Rollout) -> None:
    """Start the package's process if the recipe's agent needs one; the run uses it later. Raises
    RecipeError if its environment cannot be loaded, MachineError if the package is not
    installed."""
    if rollout.agent not in PACKAGE_AGENTS or not is_built_in(rollout):
        return
    agent: Any = create_agent(AGENTS.path_of(rollout.agent), rollout)
    host: ForeignHost = agent.host
    try:
        host.start_now()
    except (CallFailed, AgentError) as error:
        raise RecipeError(
            f"the environment of `rollout.{rollout.agent}` cannot be loaded",
            why=error.why if isinstance(error, AgentError) else str(error),
            fix=[
                f"fix `rollout.{rollout.agent}` in the recipe",
                f"{host.package.interpreter} -m pip install ...   # if a module is missing",
            ],
        ) from None


def rows_of(host: ForeignHost, method: str, **params: Any) -> list[dict[str, Any]]:
    """Return the package's tasks as rows of a data file. Raises RecipeError if it fails."""
    try:
        return host.call_now(method, params, timeout_s=ASK_TIMEOUT_S)
    except CallFailed as error:
        raise RecipeError(
            f"{host.package.name} does not return its tasks",
            why=str(error),
            fix=f"{host.package.interpreter} -m pip list   # is everything installed?",
        ) from None


def without_rows(package: str) -> RecipeError:
    """Return the error for a task of a package that is used without a recipe."""
    return RecipeError(
        f"`task:{package}` needs a recipe",
        why=f"its `rollout.{package}` defines the tasks",
        fix=f"miles data check RECIPE --set data.prompts=task:{package}",
    )
