"""One episode of an environment, to watch or to play: who speaks for the policy is a person at the
terminal, or a model behind an endpoint. Nobody learns from it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from milescli.agents.environment import begun_with
from milescli.agents.environment_fleet import EnvironmentFleet
from milescli.core.types import Prompt
from milescli.recipe.environments import EnvironmentSettings
from milescli.rollout.environments import Step, seed_of

Player = Callable[[Sequence[dict[str, Any]]], Awaitable[str]]
"""The messages so far -> what is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One action; the first thing that is seen is none."""

    shown: str
    said: str | None
    step: Step | None


async def played(
    settings: EnvironmentSettings, prompt: Prompt, player: Player, *, max_turns: int
) -> AsyncIterator[Move]:
    """What is shown first, then each move as it is done. Raises AgentError where the environment
    fails, and what the player raises."""
    fleet = EnvironmentFleet(settings, num_processes=1)
    try:
        async with fleet.episode(prompt.text, prompt.label, seed_of(prompt)) as episode:
            messages = begun_with(prompt, await episode.reset())
            yield Move(shown=messages[-1]["content"], said=None, step=None)
            for _ in range(max_turns):
                said = await player(messages)
                step = await episode.step(said)
                yield Move(shown=step.observation, said=said, step=step)
                if step.ended:
                    return
                messages += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": step.observation},
                ]
    finally:
        fleet.close()
