"""Rewards that need no label: `format` (does a response look as it should?), `length` (a penalty
for long ones, to be one part of several) and `none` (for runs that learn from a teacher alone).

The shaping `overlong` penalises length, too; it changes the rewards that are trained on and no
metric."""

from __future__ import annotations

import re

from milescli.recipe.rewards import FormatSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.rewards.extraction import answer_after_one_thinking, last_boxed

_MARKED = re.compile(r"####[ \t]*\S")


class Format:
    r"""Returns 1.0 if the response has the form that `rollout.format` requires, else 0.0.

    `answer`: the response must have a non-empty answer in `\boxed{}` (boxed), after `####` on its
    line (mark), or in either (any); with `none`, no answer is required. `think_tags`: the response
    must be `<think> ... </think>` followed by the answer, each tag once (the first may be missing,
    if a chat template writes it), and neither part empty.

    >>> score(response=r"So \boxed{5}")
    1.0
    >>> score(response="5")
    0.0
    >>> score(response="#### 5", format={"answer": "boxed"})
    0.0
    >>> score(response="<think>2 + 3</think> #### 5", format={"think_tags": True})
    1.0
    >>> score(response="#### 5", format={"think_tags": True})
    0.0
    """

    needs_label = False

    def __init__(self, settings: FormatSettings) -> None:
        self._settings = settings

    def with_settings(self, rollout: Rollout) -> Format:
        """Return the reward with the recipe's settings. Raises RecipeError if they are invalid."""
        return Format(rollout.format)

    def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """Score one response as the class describes."""
        answer = (
            answer_after_one_thinking(response) if self._settings.think_tags else response.strip()
        )
        return float(bool(answer) and self._has_answer(answer))

    def _has_answer(self, text: str) -> bool:
        wanted = self._settings.answer
        is_boxed = wanted in ("any", "boxed") and last_boxed(text) is not None
        is_marked = wanted in ("any", "mark") and _MARKED.search(text) is not None
        return wanted == "none" or is_boxed or is_marked


format = Format(FormatSettings())
"""The built-in reward `format`."""


class Length:
    """Returns -min(1, max(0, (n - target) / (limit - target))): 0.0 up to
    `rollout.length.target_tokens`, falling linearly to -1.0 at `rollout.length.limit_tokens` and
    beyond. n: tokens that the policy sampled for the attempt, over all turns.

    >>> score(num_tokens=100, length={"target_tokens": 100, "limit_tokens": 200})
    -0.0
    >>> score(num_tokens=150, length={"target_tokens": 100, "limit_tokens": 200})
    -0.5
    >>> score(num_tokens=900, length={"target_tokens": 100, "limit_tokens": 200})
    -1.0
    """

    needs_label = False
    takes_num_tokens = True

    def __init__(self, target: int, limit: int) -> None:
        self._target, self._limit = target, limit

    def with_settings(self, rollout: Rollout) -> Length:
        """Return the reward with the recipe's settings. Raises RecipeError if they are invalid."""
        return Length(*rollout.length_bounds)

    def __call__(
        self, *, prompt: str, response: str, label: str | None, num_tokens: int = 0
    ) -> float:
        """Score one response as the class describes; `num_tokens` is the n of the formula."""
        over = (num_tokens - self._target) / (self._limit - self._target)
        return -min(1.0, max(0.0, over))


length = Length(*Rollout().length_bounds)
"""The built-in reward `length`."""


def none(*, prompt: str, response: str, label: str | None) -> float:
    """Return 0.0 for every response: nothing scores it (`train.distill.reward_weight: 0`).

    >>> score(response="5")
    0.0
    """
    return 0.0
