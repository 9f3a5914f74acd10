"""Who else speaks in an episode: roles of the agent `multi_agent`, the user of the agent `chat`.
Sections of `rollout`; part of the schema."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from milescli.recipe.rewards import Requests
from milescli.recipe.section import NonNegativeFloat, Positive, Section


class SpeakerSettings(Requests):
    """A model behind an OpenAI-compatible endpoint that takes turns. Nothing that it says is
    trained on."""

    url: str | None = None
    """Of the endpoint, up to its version: http://127.0.0.1:8000/v1."""
    model: str | None = None
    """As the endpoint calls it."""
    max_tokens: Positive = 512
    """Of one turn."""
    temperature: NonNegativeFloat = 1.0


class Role(Section):
    """One of those who speak in turn. Each has a conversation of its own, in which what the others
    say comes from the user, as `name: text`."""

    prompt: str | None = None
    """Its system message; null: none of its own."""
    sees: Literal["all", "prompt", "others"] = "all"
    """What it is shown beside its own turns. all: the prompt, and what the others say; prompt: the
    prompt alone; others: what they say alone."""
    endpoint: SpeakerSettings | None = None
    """Who plays it, where that is a model behind an endpoint."""
    policy: str | None = None
    """Who plays it, where that is an older version of the policy: a Hugging Face folder, a name on
    the hub, a run, or RUN@STEP. The run serves it on an engine of its own, as it is; null, and no
    `endpoint`: the policy itself."""
    trained: bool = True
    """false: the policy itself plays it, and nothing that it says there is trained on."""
    reward: str | dict[str, float] | None = None
    """Its own, written as `rollout.reward` is; its advantages are among the same role of the
    group's samples. null: it shares the episode's reward."""
    scores: Literal["turn", "episode"] = "turn"
    """What its own reward is given as the response. turn: its last turn; episode: every turn of
    every role, as JSON: `[{"role": "solver", "content": "42"}, ...]`."""

    @property
    def is_trained(self) -> bool:
        """Whether anything that it says is trained on."""
        return self.trained and self.is_policy

    @property
    def is_policy(self) -> bool:
        """Whether the policy that is trained plays it."""
        return self.endpoint is None and self.policy is None

    @property
    def reward_weights(self) -> dict[str, float]:
        """Its own rewards by name; none where it shares the episode's."""
        own = self.reward
        return {own: 1.0} if isinstance(own, str) else own or {}


class UserSettings(Section):
    """The user of the agent `chat`: either `script` or `endpoint`."""

    script: list[str] = Field(default=[])
    """What the user says after each response, in order; then the conversation has ended."""
    endpoint: SpeakerSettings = SpeakerSettings()
    """Who simulates the user, where `endpoint.url` is set."""
    prompt: str | None = None
    """System message of the simulated one: who it is, what it wants, and when it says
    `ends_with`."""
    ends_with: str = "[END]"
    """What the simulated user says to end the conversation; it must stand in `prompt`."""
