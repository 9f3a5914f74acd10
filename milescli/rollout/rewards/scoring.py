"""Scores responses off the event loop: each call has a time limit, is retried as the recipe says,
and then fails with its traceback. For one reward (Scorer), or several with weights
(WeightedScorer)."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from milescli.core.concurrency import all_or_first_error, in_thread
from milescli.core.errors import MilesError, RewardError
from milescli.core.types import Prompt
from milescli.core.user_code import source_location, user_traceback
from milescli.rollout.base import BoundedReward, RewardFn
from milescli.workers.worker import CallFailed

T = TypeVar("T")
NUM_THREADS = 32
"""Number of plain rewards that run at once."""
_SHOWN_CHARACTERS = 200
_OF_SERVICE = re.compile(
    r"^[\w.]*(OSError|Connect|Timeout|HTTP|URLError|RateLimit|Unavailable|SSL|gaierror|"
    r"Disconnected|APIError|IncompleteRead)\w*(:|$)",
    re.MULTILINE,
)
"""Matches the last line of a traceback of a service that did not answer, whatever library called
it."""


def is_temporary(error: BaseException | None) -> bool:
    """Return True if a reward failed because a service did not answer, so that a retry may succeed;
    False for a mistake in its code."""
    if error is None:
        return False
    text = str(error) if isinstance(error, CallFailed) else user_traceback(error)
    return _OF_SERVICE.search(text) is not None


def is_async(reward: object) -> bool:
    """Return True if calls of the reward are awaited."""
    call = getattr(reward, "__call__", reward)  # noqa: B004 - an object's own `async def __call__`
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """Holds a response to score."""

    text: str
    num_tokens: int = 0
    """Number of tokens that the policy sampled."""
    token_ids: Sequence[int] = ()
    """Prompt and response, as the policy saw and sampled them; the last trajectory, if there are
    several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Holds the result of scoring."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """With several rewards: the value of each, before its weight."""


class Scoring(Protocol):
    """Scores the responses of an episode."""

    def of(self, prompt: Prompt) -> Scoring:
        """Return the scorer of this prompt."""
        ...

    @property
    def scores_groups(self) -> bool:
        """Return True if the reward takes all responses to a prompt at once: `score_responses`."""
        ...

    async def score_response(self, prompt: Prompt, response: Response) -> Score:
        """Score one response. Raises RewardError."""
        ...

    async def score_responses(self, prompt: Prompt, responses: Sequence[Response]) -> list[Score]:
        """Return one score per response to a prompt. Raises RewardError."""
        ...


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
    ) -> None:
        """Set the bounds. `name`: the reward's name in the recipe, for errors; `timeout_s`: bound
        on one call, not on the wait for a free thread. A reward may lower `num_threads` by an
        attribute `max_concurrency`."""
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
        self._extra_arguments = [
            name for name in ("num_tokens", "token_ids") if getattr(reward, f"takes_{name}", False)
        ]
        self.takes_images = getattr(reward, "takes_images", False)
        """It is given `images`, the PNG file of each image of the prompt."""

    def of(self, prompt: Prompt) -> Scoring:
        """Return the scorer of this prompt."""
        return self

    @property
    def scores_groups(self) -> bool:
        """Return True if the reward takes all responses to a prompt at once: `score_group`."""
        return getattr(self._reward, "scores_groups", False)

    async def score(self, prompt: Prompt, response: str) -> float:
        """Return the reward of a text. Raises as `score_response`."""
        return (await self.score_response(prompt, Response(text=response))).reward

    async def score_response(self, prompt: Prompt, response: Response) -> Score:
        """Score one response. Raises RewardError with the last failure after `retries` + 1
        failures."""

        async def call() -> float:
            return finite_reward(await self._call(prompt, response))

        return Score(reward=await self._with_retries(prompt, response.text, call))

    async def score_responses(self, prompt: Prompt, responses: Sequence[Response]) -> list[Score]:
        """Score all responses to a prompt."""
        if not self.scores_groups:
            return await all_or_first_error([self.score_response(prompt, one) for one in responses])
        rewards = await self.score_group(prompt, [response.text for response in responses])
        return [Score(reward=reward) for reward in rewards]

    async def score_group(self, prompt: Prompt, responses: list[str]) -> list[float]:
        """Return one reward per response, if `scores_groups`. Raises as `score`."""

        async def call() -> list[float]:
            async with self._threads:
                return await self._reward.score_group(  # type: ignore[union-attr]
                    prompt=prompt.text,
                    responses=responses,
                    label=prompt.label,
                    timeout_s=self._timeout_s,
                )

        return await self._with_retries(prompt, responses[0], call)

    async def _with_retries(
        self, prompt: Prompt, response: str, call: Callable[[], Awaitable[T]]
    ) -> T:
        for attempt in range(1, self._retries + 2):
            try:
                return await call()
            except MilesError:
                raise
            except Exception as error:  # whatever the user's function raises; TimeoutError included
                if attempt > self._retries:
                    raise self._refusal(prompt, response, error, attempts=attempt) from error
        raise AssertionError(f"no attempt was made: retries {self._retries}")

    async def _call(self, prompt: Prompt, response: Response) -> object:
        arguments: dict[str, Any] = {
            "prompt": prompt.text,
            "response": response.text,
            "label": prompt.label,
            **{name: getattr(response, name) for name in self._extra_arguments},
        }
        if self.takes_images:
            arguments["images"] = [image.png for image in prompt.images]
        if self._is_bounded:
            async with self._threads:
                return await self._reward.score(**arguments, timeout_s=self._timeout_s)  # type: ignore[union-attr]
        if self._is_async:
            async with asyncio.timeout(self._timeout_s):
                return await self._reward(**arguments)  # type: ignore[misc,operator]
        async with self._threads, asyncio.timeout(self._timeout_s):
            value = await in_thread(lambda: self._reward(**arguments))  # type: ignore[operator]
            return await value if isinstance(value, Awaitable) else value

    def _refusal(
        self, prompt: Prompt, response: str, error: Exception, *, attempts: int
    ) -> RewardError:
        if isinstance(error, TimeoutError) and (self._is_bounded or not str(error)):
            reason, fix = (
                str(error) or f"it did not return within {self._timeout_s:g} s",
                f"--set rollout.reward_timeout_s={2 * self._timeout_s:g}",
            )
        else:
            reason, fix = (
                str(error) if isinstance(error, CallFailed) else user_traceback(error),
                f"fix the reward{source_location(self._name)} or the label of prompt "
                f"{prompt.index}, then start or resume the run",
            )
        times = "" if attempts == 1 else f" (attempt {attempts} of {attempts})"
        return RewardError(
            f"the reward `{self._name}` failed on a response to prompt {prompt.index}{times}",
            why=f"{reason}; label {_shown(prompt.label)}; the response begins {_shown(response)}",
            fix=[fix, "--set rollout.reward_retries=2   # if the failure is temporary"]
            if attempts == 1 and is_temporary(error)
            else fix,
        )


class WeightedScorer:
    """Scores the same responses with several rewards at once, and returns their weighted sum. The
    error of a failing reward names it."""

    def __init__(self, parts: Mapping[str, tuple[Scorer, float]]) -> None:
        """Set the scorer and the weight of each name."""
        self._parts = dict(parts)

    def of(self, prompt: Prompt) -> Scoring:
        """Return the scorer of this prompt."""
        return self

    @property
    def scores_groups(self) -> bool:
        """Return True if one of the rewards takes all responses to a prompt at once."""
        return any(scorer.scores_groups for scorer, _ in self._parts.values())

    async def score_response(self, prompt: Prompt, response: Response) -> Score:
        """Score one response."""
        scorers = [scorer for scorer, _ in self._parts.values()]
        return self._summed(
            await all_or_first_error([s.score_response(prompt, response) for s in scorers])
        )

    async def score_responses(self, prompt: Prompt, responses: Sequence[Response]) -> list[Score]:
        """Score all responses to a prompt."""
        scorers = [scorer for scorer, _ in self._parts.values()]
        rows = await all_or_first_error([s.score_responses(prompt, responses) for s in scorers])
        return [self._summed(scores) for scores in zip(*rows, strict=True)]

    def _summed(self, scores: Sequence[Score]) -> Score:
        parts = {name: one.reward for name, one in zip(self._parts, scores, strict=True)}
        weights = {name: weight for name, (_, weight) in self._parts.items()}
        return Score(reward=sum(weights[name] * parts[name] for name in parts), parts=parts)


def _shown(text: str | None) -> str:
    if text is None or len(text) <= _SHOWN_CHARACTERS:
        return repr(text)
    return repr(f"{text[:_SHOWN_CHARACTERS]}...")


def finite_reward(value: object, *, what: str = "the reward") -> float:
    """Return the reward as a float; `what` names it. Raises TypeError or ValueError unless it is a
    finite number."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"{what} must be a number, but is {value!r} ({type(value).__name__})")
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, but is {number}")
    return number


class SourceScorer:
    """Scores prompts of some sources of a mix with rewards of their own."""

    def __init__(self, usual: Scoring, own: Mapping[str, Scoring]) -> None:
        """Use `own` by the name of the source, and `usual` for the others."""
        self._usual, self._own = usual, own

    def of(self, prompt: Prompt) -> Scoring:
        """Return the scorer of this prompt."""
        return self._own.get(prompt.source or "", self._usual)

    @property
    def scores_groups(self) -> bool:
        """Return True if the usual reward scores groups; use `of` for the reward of a prompt."""
        return self._usual.scores_groups

    async def score_response(self, prompt: Prompt, response: Response) -> Score:
        """Score one response."""
        return await self.of(prompt).score_response(prompt, response)

    async def score_responses(self, prompt: Prompt, responses: Sequence[Response]) -> list[Score]:
        """Score all responses to a prompt."""
        return await self.of(prompt).score_responses(prompt, responses)
