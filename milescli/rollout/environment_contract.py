"""What an environment must satisfy, checked by `miles env check`, and by `check_environment` in its
author's tests. Not used by a run."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milescli.core.errors import RecipeError
from milescli.core.types import Prompt
from milescli.data.images import Content, text_of
from milescli.rollout.environments import (
    Environment,
    Step,
    checked_start,
    checked_step,
    create_environment,
    numbered_rows,
    seed_of,
)

ACTIONS = ("up", "down", "left", "right", "stop", "0", "1", "2", "3", "[5]", "A", "yes", "é ☃", "")
"""Actions to try if the environment's own are unknown: some of them mean something in most
environments."""
NUM_EPISODES, MAX_STEPS = 32, 64
MAX_LEAKED_FILES, MAX_LEAKED_THREADS = 8, 8
"""Numbers of files and threads that an environment may leave open after all its episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentCheck:
    """Holds the observations of a check."""

    num_episodes: int
    num_steps: int
    num_ended: int
    """Episodes that ended by themselves, within MAX_STEPS random actions."""
    rewards: tuple[float, float]
    """The lowest and the highest reward of an episode."""
    steps_per_s: float
    first: str
    """The first observation that the policy sees."""


def check_environment(
    factory_or_name: Any,
    *,
    settings: Mapping[str, Any] | None = None,
    rows: Sequence[Prompt] = (),
    actions: Sequence[str] = ACTIONS,
) -> EnvironmentCheck:
    """Play random episodes, each twice. `rows`: prompts of the data; none: numbers. Raises
    RecipeError if an episode differs for the same seed and actions, leaves its range of rewards,
    returns something other than a Step, or leaves files or threads open; and what the environment
    raises."""
    rows = rows or numbered_rows(NUM_EPISODES)
    one, other = (create_environment(factory_or_name, settings or {}) for _ in range(2))
    before: tuple[int, int] | None = None
    rewards, num_steps, num_ended, first, seconds = list[float](), 0, 0, "", 0.0
    for number, row in enumerate(rows):
        chosen = random.Random(number)
        chosen_actions = [chosen.choice(actions) for _ in range(MAX_STEPS)]
        began = time.perf_counter()
        start, steps = _play_episode(one, row, chosen_actions)
        seconds += time.perf_counter() - began
        again = _play_episode(other, row, chosen_actions)
        _require_same((start, steps), again, row)
        rewards.append(sum(step.reward for step in steps))
        num_steps, num_ended = num_steps + len(steps), num_ended + steps[-1].ended
        first = first or (row.text if start is None else text_of(start))
        if number == len(rows) // 2:
            before = _num_open()
    _require_range(rewards, getattr(one, "reward_range", (0.0, 1.0)))
    _require_no_leak(before, _num_open())
    for environment in (one, other):
        if (close := getattr(environment, "close", None)) is not None:
            close()
    return EnvironmentCheck(
        num_episodes=len(rows),
        num_steps=num_steps,
        num_ended=num_ended,
        rewards=(min(rewards), max(rewards)),
        steps_per_s=num_steps / max(seconds, 1e-9),
        first=first,
    )


def _play_episode(
    environment: Environment, row: Prompt, chosen_actions: Sequence[str]
) -> tuple[Content | None, list[Step]]:
    start = environment.reset(prompt=row.text, label=row.label, seed=seed_of(row))
    try:
        start = checked_start(start)
        steps = list[Step]()
        for action in chosen_actions:
            steps.append(checked_step(environment.step(action)))
            if steps[-1].ended:
                break
    except ValueError as error:
        raise _broken(f"{error} (episode of seed {seed_of(row)})") from error
    return start, steps


def _require_same(one: Any, other: Any, row: Prompt) -> None:
    if one == other:
        return
    if one[0] != other[0]:
        difference = f"its reset says {one[0]!r:.200}, and the second time {other[0]!r:.200}"
    else:
        pairs = enumerate(zip(one[1], other[1], strict=False), start=1)
        place, (step, again) = next((n, p) for n, p in pairs if p[0] != p[1])
        difference = f"step {place} is {step!r:.200}, and the second time {again!r:.200}"
    raise _broken(f"the same seed ({seed_of(row)}) and actions do not give the same: {difference}")


def _require_range(rewards: Sequence[float], bounds: tuple[float, float] | None) -> None:
    if bounds is None:
        return
    low, high = bounds
    if beyond := [reward for reward in rewards if not low <= reward <= high]:
        raise _broken(
            f"an episode was worth {beyond[0]:g}, and its `reward_range` is {low:g} to {high:g}"
        )


def _num_open() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def _require_no_leak(before: tuple[int, int] | None, after: tuple[int, int]) -> None:
    """Compare what is open after the first and after the second half of the episodes: a file that
    is opened only once is no leak. Raises RecipeError if the number grows."""
    if before is None:
        return
    files, threads = after[0] - before[0], after[1] - before[1]
    if files > MAX_LEAKED_FILES or threads > MAX_LEAKED_THREADS:
        raise _broken(
            f"its episodes keep what they open: {files} files and {threads} threads more after "
            f"{NUM_EPISODES // 2} episodes"
        )


def _broken(why: str) -> RecipeError:
    return RecipeError(
        "the environment does not meet its contract",
        why=why,
        fix="fix it; docs/agents.md describes what an environment must do",
    )
