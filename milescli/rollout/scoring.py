"""Scores responses off the event loop: each call bounded, retried as the recipe says, then refused
with its traceback."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from milescli.core.concurrency import in_thread
from milescli.core.errors import MilesError, RewardError
from milescli.core.types import Prompt
from milescli.core.user_code import place_of, user_traceback
from milescli.core.user_process import CallFailed
from milescli.rollout.base import BoundedReward, RewardFn

T = TypeVar("T")
NUM_THREADS = 32
"""Plain rewards that run at once."""
_SHOWN_CHARACTERS = 200


def is_async(reward: object) -> bool:
    """Whether its calls are awaited."""
    call = getattr(reward, "__call__", reward)  # noqa: B004 - an object's own `async def __call__`
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(call)


class Scorer:
    """Calls one reward function. Used by episodes; belongs to one event
    loop."""

    def __init__(
        self,
        reward: RewardFn | BoundedReward,
        *,
        name: str,
        timeout_s: float,
        retries: int = 0,
        num_threads: int = NUM_THREADS,
        by_source: Mapping[str, Scorer] | None = None,
    ) -> None:
        """`name` as the recipe says it, for errors; `timeout_s` bounds one call, not the wait for a
        free thread.

        `by_source`: who scores the prompts of a source of `data.mix`, where it is not this one. A
        reward may lower `num_threads` by an attribute `max_concurrency`.
        """
        self._by_source = by_source or {}
        self._reward = reward
        self._name = name
        self._timeout_s = timeout_s
        self._retries = retries
        most = getattr(reward, "max_concurrency", num_threads)
        self._threads = asyncio.Semaphore(
            most if hasattr(reward, "score") else min(num_threads, most)
        )
        self._is_async = is_async(reward)
        self._is_bounded = hasattr(reward, "score")

    def of(self, prompt: Prompt) -> Scorer:
        """Who scores this prompt."""
        return self._by_source.get(prompt.source or "", self)

    @property
    def scores_groups(self) -> bool:
        """Whether the reward takes all responses to a prompt at once: `score_group`."""
        return getattr(self._reward, "scores_groups", False)

    async def score(self, prompt: Prompt, response: str) -> float:
        """The reward of one response. Raises RewardError after `retries` + 1 failures, of the last
        one."""

        async def call() -> float:
            return finite_reward(await self._call(prompt, response))

        return await self._tried(prompt, response, call)

    async def score_group(self, prompt: Prompt, responses: list[str]) -> list[float]:
        """One for each response, where `scores_groups`. Raises as `score`."""

        async def call() -> list[float]:
            async with self._threads:
                return await self._reward.score_group(  # type: ignore[union-attr]
                    prompt=prompt.text,
                    responses=responses,
                    label=prompt.label,
                    timeout_s=self._timeout_s,
                )

        return await self._tried(prompt, responses[0], call)

    async def _tried(self, prompt: Prompt, response: str, call: Callable[[], Awaitable[T]]) -> T:
        for attempt in range(1, self._retries + 2):
            try:
                return await call()
            except MilesError:
                raise
            except Exception as error:  # whatever the user's function raises; TimeoutError included
                if attempt > self._retries:
                    raise self._refusal(prompt, response, error, attempts=attempt) from error
        raise AssertionError(f"no attempt was made: retries {self._retries}")

    async def _call(self, prompt: Prompt, response: str) -> object:
        if self._is_bounded:
            async with self._threads:
                return await self._reward.score(  # type: ignore[union-attr]
                    prompt=prompt.text,
                    response=response,
                    label=prompt.label,
                    timeout_s=self._timeout_s,
                )
        if self._is_async:
            async with asyncio.timeout(self._timeout_s):
                return await self._reward(prompt=prompt.text, response=response, label=prompt.label)  # type: ignore[misc]
        async with self._threads, asyncio.timeout(self._timeout_s):
            value = await in_thread(
                lambda: self._reward(prompt=prompt.text, response=response, label=prompt.label)
            )
            return await value if isinstance(value, Awaitable) else value

    def _refusal(
        self, prompt: Prompt, response: str, error: Exception, *, attempts: int
    ) -> RewardError:
        shown = response[:_SHOWN_CHARACTERS] + ("..." if len(response) > _SHOWN_CHARACTERS else "")
        if isinstance(error, TimeoutError) and (self._is_bounded or not str(error)):
            reason, fix = (
                str(error) or f"it did not return within {self._timeout_s:g} s",
                f"--set rollout.reward_timeout_s={2 * self._timeout_s:g}",
            )
        else:
            reason, fix = (
                str(error) if isinstance(error, CallFailed) else user_traceback(error),
                f"mend the reward{place_of(self._name)} or the label of prompt {prompt.index}, "
                "then start or resume the run",
            )
        times = "" if attempts == 1 else f" (attempt {attempts} of {attempts})"
        return RewardError(
            f"the reward `{self._name}` failed on a response to prompt {prompt.index}{times}",
            why=f"{reason}; label {prompt.label!r}; the response begins {shown!r}",
            fix=[fix, "--set rollout.reward_retries=2   # where it is only flaky"]
            if attempts == 1
            else fix,
        )


def finite_reward(value: object) -> float:
    """The reward as a float. Raises TypeError or ValueError where it is not a finite number."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"the reward must be a number, and is {value!r} ({type(value).__name__})")
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"the reward must be finite, and is {number}")
    return number
