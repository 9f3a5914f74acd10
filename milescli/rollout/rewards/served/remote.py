"""The reward `remote`: a server of the user scores responses over HTTP."""

from __future__ import annotations

from typing import Any

from milescli.recipe.rewards import RemoteSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.endpoint import Endpoint
from milescli.rollout.rewards.scoring import finite_reward

SECTION = "rollout.remote_reward"


class Remote:
    """Returns the score that a server replies to a POST of JSON: {prompt, response, label} ->
    {"reward": 0.5}.

    With `rollout.remote_reward.group`, a request contains all responses to a prompt: {prompt,
    responses, label} -> {"rewards": [0.5, ...]}, one for each, in their order. `label` is null if
    the data has none. Each request has a time limit, and is retried after 429, 5xx or a failed
    connection."""

    needs_label = False

    def __init__(self, settings: RemoteSettings) -> None:
        """Load the key. Raises RecipeError if it is missing."""
        self.scores_groups = settings.group
        self.max_concurrency = settings.concurrency
        self._endpoint = Endpoint(
            caller="the reward `remote`",
            section=SECTION,
            url=settings.url or "",
            timeout_s=settings.timeout_s,
            retries=settings.retries,
            api_key_env=settings.api_key_env,
        )

    def with_settings(self, rollout: Rollout) -> Remote:
        """Return the reward with the recipe's settings. Raises RecipeError if they are invalid."""
        return Remote(rollout.remote_reward)

    async def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """Score one response as the class describes."""
        reply = await self._endpoint.post({"prompt": prompt, "response": response, "label": label})
        return self._number(_field(reply, "reward"), reply)

    async def score(
        self, *, prompt: str, response: str, label: str | None, timeout_s: float
    ) -> float:
        """Score one response (BoundedReward); its own settings bound the call."""
        return await self(prompt=prompt, response=response, label=label)

    async def score_group(
        self, *, prompt: str, responses: list[str], label: str | None, timeout_s: float
    ) -> list[float]:
        """Score all responses to a prompt (BoundedReward); its own settings bound the call."""
        body = {"prompt": prompt, "responses": responses, "label": label}
        reply = await self._endpoint.post(body)
        rewards = _field(reply, "rewards")
        if not isinstance(rewards, list) or len(rewards) != len(responses):
            raise self._endpoint.failure(
                f"it was given {len(responses)} responses and replied {reply!r:.200}, not "
                '{"rewards": [...]} with a number for each'
            )
        return [self._number(reward, reply) for reward in rewards]

    def _number(self, value: object, reply: object) -> float:
        try:
            return finite_reward(value)
        except (TypeError, ValueError) as error:
            raise self._endpoint.failure(f"it replied {reply!r:.200}: {error}") from None


def _field(reply: Any, name: str) -> object:
    return reply.get(name) if isinstance(reply, dict) else None


remote = Remote(RemoteSettings())
"""The built-in reward `remote`, before it has settings."""
