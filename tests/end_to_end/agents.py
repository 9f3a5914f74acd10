"""Agents of a user's, for the tests of this folder."""

from __future__ import annotations

import os
from typing import ClassVar

import httpx

from milescli.core.types import Prompt
from milescli.rollout.base import Outcome, Session
from milescli.rollout.environments import Step

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


async def dialogue(prompt: Prompt, session: Session) -> Outcome:
    """Three turns with a user who does not listen; the second is tried twice, by HTTP."""
    messages, said = list(prompt.messages), []
    for more in ("Go on.", "And é?", ""):
        reply = await session.chat(messages, tools=[ADD], max_new_tokens=6)
        if more == "And é?":
            headers = {"Authorization": f"Bearer {session.api_key}"}
            body = {"messages": messages, "tools": [ADD], "max_tokens": 3}
            async with httpx.AsyncClient(headers=headers, timeout=60) as http:
                asked = await http.post(f"{session.base_url}/chat/completions", json=body)
            assert asked.status_code == 200, asked.text
        said.append(reply.message["content"])
        messages += [reply.message, {"role": "user", "content": more}]
    figures = {"said": float(len(said)), "has_secret": float("SOME_SERVICE_TOKEN" in os.environ)}
    return Outcome(text=" ".join(said), figures=figures)


class Echo:
    """An environment that pays for each turn what its number is; the first episode of every other
    seed fails."""

    reward_range = (0.0, 6.0)
    failed: ClassVar[set[int]] = set()

    def __init__(self) -> None:
        self.seed = self.num_turns = 0

    def reset(self, *, prompt: str, label: str | None, seed: int) -> str | None:
        """Begins with its seed."""
        self.seed, self.num_turns = seed, 0
        return f"Say something about {seed}."

    def step(self, action: str) -> Step:
        """Three turns."""
        if self.seed % 2 == 0 and self.seed not in self.failed:
            self.failed.add(self.seed)
            raise OSError("the board is away")
        self.num_turns += 1
        return Step(observation="Go on.", reward=self.num_turns, ended=self.num_turns == 3)


class Letters:
    """An environment that pays for each turn the share of its characters that differ; what it shows
    next is one of two texts."""

    reward_range = (0.0, 3.0)

    def __init__(self) -> None:
        self.num_turns = 0

    def reset(self, *, prompt: str, label: str | None, seed: int) -> str | None:
        """Begins alike for all samples of a prompt."""
        self.num_turns = 0
        return f"Say something about {seed}."

    def step(self, action: str) -> Step:
        """Three turns."""
        self.num_turns += 1
        reward = len(set(action)) / max(len(action), 1)
        shown = "Go on." if len(action) % 2 else "And then?"
        return Step(observation=shown, reward=reward, ended=self.num_turns == 3)
