"""Implements `rollout.environment.name=openenv`: environments behind OpenEnv's reset and step, by
its own client, which is installed in a virtual environment of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milescli.agents.foreign.host import ForeignHost
from milescli.agents.foreign.packages import package_named
from milescli.agents.foreign.playing import host_of
from milescli.core.errors import AgentError, RecipeError
from milescli.rollout.environments import Step
from milescli.workers.worker import CallFailed

FULL = "CAPACITY_REACHED"
CALL_TIMEOUT_S = 3600.0
"""`rollout.environment.step_timeout_s` is shorter, and ends the process first."""


class OpenEnvEnvironment:
    """Calls an environment behind OpenEnv's reset and step; each object has its own session on the
    server. Implements milescli.rollout.environments.Environment."""

    reward_range = None

    @staticmethod
    def require(settings: Mapping[str, Any]) -> None:
        """Raise MachineError if the package is not installed, RecipeError unless the settings name
        exactly one server."""
        package_named("openenv").require(needed_by="the environment `openenv`")
        if settings and (settings.get("url") is None) == (settings.get("server") is None):
            raise RecipeError(
                "the environment `openenv` needs exactly one server",
                why="its settings must have either `url` (a running server) or `server` (one "
                "that miles starts here)",
                fix=[
                    "--set 'rollout.environment.settings={url: http://127.0.0.1:8000}'",
                    "--set 'rollout.environment.settings={server: my_env.server.app:app}'",
                ],
            )

    def __init__(
        self,
        *,
        url: str | None = None,
        server: str | None = None,
        action: str | None = None,
        observation: str | None = None,
        reset: Mapping[str, Any] | None = None,
    ) -> None:
        """Connect to a server. `url`: address of a running server; `server`: import path of an app,
        started on loopback by each environment process; `action`: field that takes the model's text
        if it is not a JSON object, by default the only text field; `observation`: field that the
        model is shown, by default the only one, else all of them as JSON; `reset`: further
        parameters of the environment's reset, besides the seed."""
        self.require({"url": url, "server": server})
        start = {"url": url, "server": server, "action": action, "observation": observation}
        self._host = host_of(ForeignHost(package_named("openenv"), start))
        self._options = dict(reset or {})
        self._session: str | None = None
        self._num_unclear = 0

    def reset(self, *, prompt: str, label: str | None, seed: int) -> str | None:
        """Start an episode with `seed`, and return the server's first observation."""
        start = self._ask("reset", session=self._session, seed=seed, options=self._options)
        self._session, self._num_unclear = start["session"], 0
        return start["observation"]

    def step(self, action: str) -> Step:
        """Take one action: a JSON object is the action itself, other text its field `action`."""
        step = self._ask("step", session=self._session, text=action)
        if "unclear" in step:
            self._num_unclear += 1
            figures = {"not_understood": float(self._num_unclear)}
            return Step(observation=step["unclear"], figures=figures)
        return Step(**step)

    def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            self._ask("end", session=self._session)
            self._session = None

    def _ask(self, method: str, **params: Any) -> Any:
        try:
            return self._host.call_now(method, params, timeout_s=CALL_TIMEOUT_S)
        except CallFailed as error:
            server = self._host.start["url"] or self._host.start["server"]
            fix = "miles env check openenv --settings '{...}'   # with those of the recipe"
            if FULL in str(error):
                fix = (
                    "let the server take more sessions at once: `max_concurrent_envs`, of an "
                    "environment whose SUPPORTS_CONCURRENT_SESSIONS is true"
                )
            raise AgentError(
                "the environment `openenv` failed",
                why=f"{server}: {error}",
                fix=fix,
            ) from None
