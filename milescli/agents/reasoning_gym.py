"""Single-turn tasks of the package `reasoning-gym`, generated on demand.
`rollout.environment.name=reasoning_gym`. The reward of the same name scores rows that were
generated beforehand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from milescli.agents.extras import require_package
from milescli.rollout.environments import Step

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymTask:
    """Poses tasks of `reasoning-gym`, of one turn each. Implements
    milescli.rollout.environments.Environment."""

    reward_range = (0.0, 1.0)

    @staticmethod
    def require(settings: Mapping[str, Any]) -> None:
        """Raise MachineError if the package is not installed."""
        require_package("reasoning_gym", needed_by="the environment `reasoning_gym`")

    def __init__(self, *, task: str, **options: Any) -> None:
        """Make the data set `task` with `options` by `reasoning_gym.create_dataset`."""
        import reasoning_gym

        self._make = lambda seed: reasoning_gym.create_dataset(task, seed=seed, size=1, **options)
        self._tasks = self._make(0)
        self._entry: Any = None

    def reset(self, *, prompt: str, label: str | None, seed: int) -> str | None:
        """Return the question; the recipe's system prompt says where to write the answer."""
        self._tasks = self._make(seed)
        self._entry = self._tasks[0]
        return str(self._entry["question"])

    def step(self, action: str) -> Step:
        """Score the answer: the content of the last `<answer>...</answer>`, else the whole text."""
        stated = _ANSWER.findall(action)
        answer = (stated[-1] if stated else action).strip()
        return Step(reward=float(self._tasks.score_answer(answer, self._entry)), ended=True)
