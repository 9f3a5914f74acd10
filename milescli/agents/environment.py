"""Implements `rollout.agent=environment`: an agent that plays in an environment. Each turn of the
policy is an action, each observation a message of the user; the environment returns the reward.
Also plays single episodes, for `miles env play` and evaluations."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from milescli.agents.environment_fleet import EnvironmentFleet, Episode, num_processes
from milescli.agents.replying import next_reply
from milescli.core.errors import AgentError, RecipeError
from milescli.core.types import Prompt
from milescli.data.images import Content
from milescli.recipe.agents import EnvironmentSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Outcome, Session
from milescli.rollout.environments import Step, seed_of


class EnvironmentAgent:
    """Lets the policy play in `rollout.environment`, at most `rollout.max_turns` turns."""

    def __init__(self, settings: Rollout) -> None:
        self._max_turns = settings.max_turns
        here = num_processes(settings.environment, num_cores=len(os.sched_getaffinity(0)))
        self.fleet = EnvironmentFleet(settings.environment, num_processes=here)

    async def __call__(self, prompt: Prompt, session: Session) -> Outcome:
        """Play one episode; the reward of a turn is that of the environment's step."""
        began = time.monotonic()
        async with self.fleet.episode(prompt.text, prompt.label, seed_of(prompt)) as episode:
            messages = opening_messages(prompt, await episode.reset())
            seconds, last = time.monotonic() - began, Step()
            rewards, texts, figures = list[float](), list[str](), dict[str, float]()
            for _ in range(self._max_turns):
                if (reply := await next_reply(session, messages)) is None:
                    break
                texts.append(reply.message["content"])
                asked = time.monotonic()
                last = await episode.step(texts[-1])
                seconds += time.monotonic() - asked
                rewards.append(last.reward)
                figures |= last.figures
                if last.ended:
                    break
                messages += [reply.message, {"role": "user", "content": last.observation}]
        return Outcome(
            text="\n".join(texts),
            turn_rewards=rewards,
            is_cut=not last.ended,
            figures={**figures, "environment_s": seconds},
        )


def try_environment(settings: EnvironmentSettings, prompt: Prompt) -> None:
    """Start one episode of a row, in a process of its own, before a run takes devices. Raises
    RecipeError if the environment cannot be created or reset."""

    async def begin() -> None:
        fleet = EnvironmentFleet(settings, num_processes=1)
        try:
            async with fleet.episode(prompt.text, prompt.label, seed_of(prompt)) as episode:
                await episode.reset()
        finally:
            fleet.close()

    try:
        asyncio.run(begin())
    except AgentError as error:
        raise RecipeError(error.what, why=error.why, fix=error.fixes) from None


def try_on_node(
    *, import_from: Sequence[str], settings: EnvironmentSettings, prompt: Prompt
) -> None:
    """Run `try_environment` on another node than the driver's, with `import_from` as its
    `sys.path`."""
    sys.path += [entry for entry in import_from if entry not in sys.path]
    try_environment(settings, prompt)


def opening_messages(prompt: Prompt, observation: Content | None) -> list[Any]:
    """Return the messages with which an episode begins: those of the prompt, or, if there is an
    observation, the prompt's system messages and the observation as the user's message."""
    messages: Sequence[Any] = prompt.messages
    if observation is None:
        return list(messages)
    kept = [message for message in messages if message["role"] == "system"]
    return [*kept, {"role": "user", "content": observation}]


class Game:
    """Plays one episode, turn by turn as its caller requests. Belongs to one event loop."""

    def __init__(self, settings: EnvironmentSettings, prompt: Prompt) -> None:
        self._fleet = EnvironmentFleet(settings, num_processes=1)
        self._prompt = prompt
        self._stack = AsyncExitStack()
        self._episode: Episode | None = None
        self.messages: list[dict[str, Any]] = []
        """The conversation so far, in OpenAI's form; the player sees the last message."""

    async def begin(self) -> None:
        """Start the episode and set `messages`. Raises AgentError if the environment fails."""
        self._stack.callback(self._fleet.close)
        prompt = self._prompt
        playing = self._fleet.episode(prompt.text, prompt.label, seed_of(prompt))
        self._episode = await self._stack.enter_async_context(playing)
        self.messages = opening_messages(prompt, await self._episode.reset())

    async def act(self, action: str) -> Step:
        """Return the environment's next step. Raises AgentError as `begin`."""
        assert self._episode is not None, "a game is begun first"
        step = await self._episode.step(action)
        self.messages += [
            {"role": "assistant", "content": action},
            {"role": "user", "content": step.observation},
        ]
        return step

    async def close(self) -> None:
        """End the environment."""
        await self._stack.aclose()
