"""One episode of an environment, to watch or to play: whoever speaks for the policy is asked by the
caller, between two moves. Nobody learns from it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from milescli.agents.environment import begun_with
from milescli.agents.environment_fleet import EnvironmentFleet, Episode
from milescli.core.types import Prompt
from milescli.recipe.agents import EnvironmentSettings
from milescli.rollout.environments import Step, seed_of


class Game:
    """Belongs to one event loop."""

    def __init__(self, settings: EnvironmentSettings, prompt: Prompt) -> None:
        self._fleet = EnvironmentFleet(settings, num_processes=1)
        self._prompt = prompt
        self._stack = AsyncExitStack()
        self._episode: Episode | None = None
        self.messages: list[dict[str, Any]] = []
        """So far, in OpenAI's form; the last is what the player sees."""

    async def begin(self) -> None:
        """Raises AgentError where the environment fails."""
        self._stack.callback(self._fleet.close)
        prompt = self._prompt
        playing = self._fleet.episode(prompt.text, prompt.label, seed_of(prompt))
        self._episode = await self._stack.enter_async_context(playing)
        self.messages = begun_with(prompt, await self._episode.reset())

    async def act(self, said: str) -> Step:
        """What comes of it. Raises AgentError as `begin`."""
        assert self._episode is not None, "a game is begun first"
        step = await self._episode.step(said)
        self.messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": step.observation},
        ]
        return step

    async def close(self) -> None:
        """End the environment."""
        await self._stack.aclose()
