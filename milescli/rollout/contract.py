"""What every reward must bear, as a test that authors of plug-ins can run: `check_reward(fn)`. Not
used by a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from milescli.core.types import Prompt
from milescli.rollout.base import RewardFn
from milescli.rollout.scoring import Scorer

Example = tuple[str, str, str | None]
"""prompt, response, label"""

EXAMPLES: tuple[Example, ...] = (
    ("What is 2 + 2?", "2 + 2 = 4\n#### 4", "4"),
    ("What is 2 + 2?", "five", "4"),
    ("What is 2 + 2?", "", "4"),
    ("What is 2 + 2?", "\x00 \u2603 \U0001f600 }{ \\boxed{ #### ", "4"),
    ("What is 2 + 2?", "4 " * 20_000, "4"),
)
"""A right response, a wrong one, an empty one, nonsense, and one that is far too long."""


def check_reward(
    reward: RewardFn,
    *,
    examples: Sequence[Example] = EXAMPLES,
    timeout_s: float = 30.0,
    num_threads: int = 8,
) -> list[float]:
    """Score every example, all of them at once and from several threads; returns the rewards in
    order.

    Raises RewardError where a call raises, takes longer than `timeout_s`, or returns anything but a
    finite number.
    """
    name = getattr(reward, "__name__", type(reward).__name__)

    async def score_all() -> list[float]:
        scorer = Scorer(reward, name=name, timeout_s=timeout_s, num_threads=num_threads)
        prompts = [
            Prompt(index=i, token_ids=[], text=text, label=label)
            for i, (text, _, label) in enumerate(examples)
        ]
        calls = [
            scorer.score(prompt, response)
            for prompt, (_, response, _) in zip(prompts, examples, strict=True)
        ]
        repeated = calls + [scorer.score(prompts[0], examples[0][1]) for _ in range(num_threads)]
        return (await asyncio.gather(*repeated))[: len(examples)]

    return asyncio.run(score_all())
