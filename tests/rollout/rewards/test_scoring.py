"""Tests of the scorer: planted faults of reward functions, and that none of them loops or hangs."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable

import pytest

from milescli.core.errors import RewardError
from milescli.core.types import Prompt
from milescli.rollout.contract import check_reward
from milescli.rollout.rewards.scoring import Scorer

PROMPT = Prompt(index=41, token_ids=[1], text="2 + 2?", label="4")


def _score(reward: Callable[..., object], *, retries: int = 0, timeout_s: float = 30.0) -> float:
    scorer = Scorer(reward, name="mine:fn", timeout_s=timeout_s, retries=retries)  # type: ignore[arg-type]
    return asyncio.run(scorer.score(PROMPT, "the response"))


def _broken(*, prompt: str, response: str, label: str | None) -> float:
    raise KeyError("no such field")


def test_a_reward_that_raises_stops_with_its_traceback_the_prompt_and_the_answer() -> None:
    with pytest.raises(RewardError) as error:
        _score(_broken)
    assert "prompt 41" in error.value.what and "mine:fn" in error.value.what
    assert 'raise KeyError("no such field")' in error.value.why and "in _broken" in error.value.why
    assert "milescli/rollout/rewards/scoring.py" not in error.value.why
    assert "the response" in error.value.why
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1.0", [1.0]])
def test_what_is_not_a_finite_number_is_an_error(value: object) -> None:
    with pytest.raises(RewardError, match="must be"):
        _score(lambda *, prompt, response, label: value)


@pytest.mark.parametrize("value", [1, True, 0.5])
def test_numbers_become_floats(value: float) -> None:
    assert _score(lambda *, prompt, response, label: value) == float(value)


@pytest.mark.parametrize("retries", [0, 2])
def test_it_is_tried_exactly_as_often_as_the_recipe_says(retries: int) -> None:
    calls = []

    def flaky(*, prompt: str, response: str, label: str | None) -> float:
        calls.append(response)
        raise OSError("judge is down")

    with pytest.raises(RewardError, match="judge is down"):
        _score(flaky, retries=retries)
    assert len(calls) == retries + 1


def test_a_retry_that_succeeds_gives_the_reward() -> None:
    failures = iter([OSError("once"), OSError("twice")])

    def flaky(*, prompt: str, response: str, label: str | None) -> float:
        for error in failures:
            raise error
        return 1.0

    assert _score(flaky, retries=2) == 1.0


def test_a_reward_that_hangs_is_given_up_and_says_the_bound() -> None:
    release = threading.Event()

    def hang(*, prompt: str, response: str, label: str | None) -> float:
        release.wait()
        return 1.0

    with pytest.raises(RewardError, match=r"did not return within 0\.05 s"):
        _score(hang, timeout_s=0.05)
    release.set()


def test_an_async_reward_is_awaited_and_bounded() -> None:
    async def quick(*, prompt: str, response: str, label: str | None) -> float:
        await asyncio.sleep(0)
        return 0.25

    async def hang(*, prompt: str, response: str, label: str | None) -> float:
        await asyncio.Event().wait()
        return 1.0

    assert _score(quick) == 0.25
    with pytest.raises(RewardError, match="did not return"):
        _score(hang, timeout_s=0.05)


def test_a_reward_that_exits_the_interpreter_is_an_error_like_any_other() -> None:
    def leave(*, prompt: str, response: str, label: str | None) -> float:
        raise SystemExit(3)

    with pytest.raises(RewardError, match="SystemExit: 3"):
        _score(leave)


def _score_all(
    reward: Callable[..., object], responses: list[str], **options: float
) -> list[float]:
    async def run() -> list[float]:
        scorer = Scorer(reward, name="all", **options)  # type: ignore[arg-type]
        return await asyncio.gather(*(scorer.score(PROMPT, text) for text in responses))

    return asyncio.run(run())


def test_responses_are_scored_at_once_and_keep_their_places() -> None:
    barrier = threading.Barrier(4, timeout=120)

    def together(*, prompt: str, response: str, label: str | None) -> float:
        barrier.wait()  # passes only when all four are here
        return float(response)

    rewards = _score_all(together, [str(n) for n in range(4)], timeout_s=120.0)
    assert rewards == [0.0, 1.0, 2.0, 3.0]


def test_calls_that_wait_for_their_turn_do_not_use_up_their_bound() -> None:
    class OneAtATime:
        max_concurrency = 1
        running = 0

        def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
            self.running += 1
            assert self.running == 1
            threading.Event().wait(1.1)
            self.running -= 1
            return 1.0

    assert _score_all(OneAtATime(), ["x"] * 6, timeout_s=6.0) == [1.0] * 6


def test_the_contract_refuses_a_reward_that_cannot_bear_an_empty_answer() -> None:
    def naive(*, prompt: str, response: str, label: str | None) -> float:
        return float(response.split()[-1] == label)

    with pytest.raises(RewardError, match="IndexError"):
        check_reward(naive)
