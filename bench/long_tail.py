"""The task of `flight.py`: responses whose lengths are log-normal, and a reward that a model of
random weights can learn. Imported by the runs that are measured, as `long_tail:capped` and
`long_tail:digits`."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

MEDIAN_TOKENS, SIGMA = 40.0, 1.2
MAX_TOKENS = 512


def cap_of(token_ids: Sequence[int]) -> int:
    """Tokens of the response to this prompt, at most: a draw that its tokens seed."""
    seed = hashlib.sha256(repr(list(token_ids)).encode()).digest()
    draw = random.Random(seed).lognormvariate(0.0, SIGMA)
    return max(4, min(MAX_TOKENS, round(MEDIAN_TOKENS * draw)))


async def capped(*, token_ids: Sequence[int], generate: Any, settings: Any) -> Any:
    """A `rollout.generation`: one call, with the bound of the prompt. The model is new, and seldom
    ends by itself."""
    return await generate(token_ids, max_new_tokens=cap_of(token_ids))


def digits(*, prompt: str, response: str, label: str | None) -> float:
    """A reward: the share of a response's characters that are digits."""
    return sum(character.isdigit() for character in response) / max(len(response), 1)
