"""The reward `reward_model`: a model with a score head, held by a process of the run, scores the
tokens that the policy read and sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from milescli.recipe.rewards import RewardModelSettings
from milescli.recipe.schema import Rollout

AT_ONCE = 4096
"""Calls that may wait for a score at once: those that arrive while the model runs form the next
batch."""


class ScoreServer(Protocol):
    """Defines the process that holds the reward model."""

    async def score(self, token_ids: Sequence[int]) -> float:
        """Return the score of one token sequence, read from its last token. Bounded in time; raises
        WaitTimeout or WorkerDied with names."""
        ...


@dataclass(frozen=True)
class ModelReward:
    """Returns the score that the reward model gives the prompt and the response, token by token as
    they were sampled; it is unlimited unless `rollout.reward_model.clip` sets limits."""

    settings: RewardModelSettings
    server: ScoreServer | None = None
    """None: the reward is only checked, not called."""

    scores_groups = False
    takes_token_ids = True
    max_concurrency = AT_ONCE

    def with_settings(self, rollout: Rollout) -> ModelReward:
        """Return the reward with the recipe's settings. Raises RecipeError if they are invalid."""
        return ModelReward(rollout.reward_model)

    def with_server(self, server: ScoreServer | None) -> ModelReward:
        """Return the reward with the server that scores."""
        return ModelReward(self.settings, server)

    async def __call__(
        self, *, prompt: str, response: str, label: str | None, token_ids: Sequence[int] = ()
    ) -> float:
        """Score one response; see the class. `prompt`, `response` and `label` are ignored."""
        assert self.server is not None, "nobody holds the reward model"
        score = await self.server.score(token_ids)
        most = self.settings.clip
        return score if most is None else max(-most, min(most, score))

    async def score(
        self,
        *,
        prompt: str,
        response: str,
        label: str | None,
        timeout_s: float,
        token_ids: Sequence[int] = (),
    ) -> float:
        """Score one response (BoundedReward); its server bounds the call."""
        return await self(prompt=prompt, response=response, label=label, token_ids=token_ids)


reward_model = ModelReward(RewardModelSettings())
"""The built-in reward `reward_model`, before it has a model."""
