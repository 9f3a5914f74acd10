"""Defines the signatures that a reward may have: one response, all responses to a prompt, or a
batch, distinguished by parameter names. Also calls the reward, inside the process of a user's
reward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any

from milescli.core.imports import import_object
from milescli.rollout.rewards.scoring import finite_reward


class Form(Enum):
    """Lists the signatures of a reward."""

    SINGLE = ("prompt", "response", "label")
    """One response -> its reward."""
    GROUP = ("prompt", "responses", "label")
    """All responses to one prompt, once all are complete -> a reward for each."""
    BATCH = ("prompts", "responses", "labels")
    """All responses since the previous call, to any prompts -> a reward for each."""


def form_of(reward: object) -> Form:
    """Return the form of a reward; SINGLE if it accepts anything."""
    names = _parameters(reward)
    return next((form for form in Form if names >= set(form.value)), Form.SINGLE)


def takes_images(reward: object) -> bool:
    """Return True if a reward of one response has a parameter `images`."""
    return form_of(reward) is Form.SINGLE and "images" in _parameters(reward)


def _parameters(reward: object) -> set[str]:
    target = reward.__init__ if inspect.isclass(reward) else reward  # type: ignore[misc]
    return set(inspect.signature(target).parameters)  # type: ignore[arg-type]


@cache
def _reward_of(path: str, timeout_s: float) -> Any:
    reward: Any = import_object(path)
    within = getattr(reward, "within", None)
    return reward if within is None else within(timeout_s)


def score(path: str, timeout_s: float, arguments: Mapping[str, Any]) -> Any:
    """Call a plain reward. Return a float, or one for each response. `timeout_s` is passed to a
    reward with `within`. Raises what the reward raises; TypeError or ValueError if it returns no
    numbers."""
    return _numbers(_reward_of(path, timeout_s)(**arguments), arguments)


async def score_async(path: str, timeout_s: float, arguments: Mapping[str, Any]) -> Any:
    """Call an async reward; like `score` otherwise."""
    return _numbers(await _reward_of(path, timeout_s)(**arguments), arguments)


def _numbers(value: Any, arguments: Mapping[str, Any]) -> float | list[float]:
    if "responses" not in arguments:
        return finite_reward(value)
    wanted = len(arguments["responses"])
    try:
        rewards = [finite_reward(reward) for reward in value]
    except TypeError as error:
        raise TypeError(f"it must return one number per response: {error}") from None
    if len(rewards) != wanted:
        raise ValueError(f"it returned {len(rewards)} rewards for {wanted} responses")
    return rewards
