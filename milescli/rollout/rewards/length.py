"""The reward `length`: a penalty for long responses, to be one part of several. Beside it there is
the shaping `overlong`, which changes the rewards that are trained on and no figure."""

from __future__ import annotations

from milescli.recipe.schema import Rollout


class Length:
    """-min(1, max(0, (n - target) / (limit - target))): 0.0 up to `rollout.length.target_tokens`,
    falling linearly to -1.0 at `rollout.length.limit_tokens` and beyond. n: tokens that the policy
    sampled for the attempt, over all turns."""

    needs_label = False
    takes_num_tokens = True

    def __init__(self, target: int, limit: int) -> None:
        self._target, self._limit = target, limit

    def made_for(self, rollout: Rollout) -> Length:
        """See REWARDS."""
        return Length(*rollout.length_bounds)

    def __call__(
        self, *, prompt: str, response: str, label: str | None, num_tokens: int = 0
    ) -> float:
        """See the class."""
        over = (num_tokens - self._target) / (self._limit - self._target)
        return -min(1.0, max(0.0, over))


length = Length(*Rollout().length_bounds)
"""The built-in reward `length`."""
