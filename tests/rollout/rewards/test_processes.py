"""Rewards of the user's in processes of their own: what they do wrong is named, bounded, and leaves
nothing behind; what they do right is quick and right."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from pathlib import Path
from typing import ClassVar

import pytest

from milescli.core.errors import DataError, RewardError
from milescli.core.types import Image, Prompt
from milescli.recipe.schema import Rollout
from milescli.rollout.rewards import in_processes
from milescli.rollout.rewards.scoring import Scorer
from milescli.workers import pool
from tests.waiting import assert_gone

pytestmark = pytest.mark.slow
ROOM = "tests.rollout.rewards.bad_rewards"


def _scorer(name: str, **options: object) -> tuple[Scorer, object]:
    rollout = Rollout(reward=f"{ROOM}:{name}", **options)  # type: ignore[arg-type]
    reward = in_processes(rollout.reward_name, rollout)
    assert reward is not None
    scorer = Scorer(reward, name=rollout.reward_name, timeout_s=rollout.reward_timeout_s)
    return scorer, reward


def _score(name: str, responses: list[str], **options: object) -> list[float]:
    async def run() -> list[float]:
        scorer, reward = _scorer(name, **options)
        prompt = Prompt(index=7, token_ids=[1], text="2 + 2?", label="4")
        try:
            async with asyncio.TaskGroup() as tasks:
                calls = [tasks.create_task(scorer.score(prompt, text)) for text in responses]
            return [call.result() for call in calls]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            reward.close()  # type: ignore[attr-defined]

    return asyncio.run(run())


@pytest.mark.parametrize("name", ["good", "good_async"])
def test_what_is_right_is_scored_in_order(name: str) -> None:
    responses = ["4", "5", "", "4", "\x00 \u2603 }{", "x" * 200_000] * 20
    expected = [float(text == "4") for text in responses]
    assert _score(name, responses) == expected


class _Starting:
    """A worker that starts slowly, and answers at once."""

    lives = True
    made: ClassVar[list[_Starting]] = []
    num_made: ClassVar[list[int]] = []
    """How many there were when one was ready."""

    def __init__(self, *said: object) -> None:
        self.made.append(self)
        self.ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        asyncio.get_running_loop().call_later(1.0, self._begin)

    def _begin(self) -> None:
        self.num_made.append(len(self.made))
        self.ready.set_result(None)

    def call(self, *said: object) -> tuple[int, concurrent.futures.Future[float]]:
        reply: concurrent.futures.Future[float] = concurrent.futures.Future()
        reply.set_result(1.0)
        return 0, reply

    def end(self) -> None:
        """Nothing runs."""


def test_a_reward_with_a_parameter_for_images_is_given_them() -> None:
    shown = Image(sha256="a", png=b"four", width=1, height=1, grid=(1, 1, 1), num_tokens=1)

    async def run(images: tuple[Image, ...]) -> float:
        scorer, reward = _scorer("bytes_of_images")
        prompt = Prompt(index=7, token_ids=[1], text="2 + 2?", label="4", images=images)
        try:
            return await scorer.score(prompt, "hi")
        finally:
            reward.close()  # type: ignore[attr-defined]

    assert asyncio.run(run((shown, shown))) == 8.0
    assert asyncio.run(run(())) == 0.0


def test_workers_that_still_start_are_no_reason_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "UserWorker", _Starting)
    reward = in_processes(f"{ROOM}:good", Rollout(reward=f"{ROOM}:good"))
    assert reward is not None

    async def run() -> list[float]:
        asked = {"prompt": "", "response": "4", "label": "4", "timeout_s": 60.0}
        return await asyncio.gather(*(reward.score(**asked) for _ in range(50)))

    assert asyncio.run(run()) == [1.0] * 50
    assert _Starting.num_made[0] == max(2, len(os.sched_getaffinity(0)))
    reward.close()


@pytest.mark.parametrize("name", ["ranking", "ranking_async"])
def test_a_reward_may_see_all_responses_to_a_prompt(name: str) -> None:
    async def run() -> list[float]:
        scorer, reward = _scorer(name)
        assert scorer.scores_groups
        prompt = Prompt(index=7, token_ids=[1], text="2 + 2?", label="4")
        try:
            return await scorer.score_group(prompt, ["a", "bb", "cc"])
        finally:
            reward.close()  # type: ignore[attr-defined]

    assert asyncio.run(run()) == [1.0, 2 / 3, 2 / 3]


def test_what_comes_meanwhile_is_the_next_batch() -> None:
    responses = ["size", "bb", "ccc", *["x" * n for n in range(1, 300)]]
    rewards = _score("batched", responses)
    assert rewards[1:] == [float(len(text)) for text in responses[1:]]
    assert rewards[0] > 100, "the calls were not put together"


def test_who_waits_for_a_batch_hears_of_whatever_it_raises() -> None:
    with pytest.raises(DataError, match="no such label"):
        _score("refusing", ["4"] * 3)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("too_few", "it returned 2 rewards for 3 responses"),
        ("one_number", "it must return one number per response"),
    ],
)
def test_a_reward_of_many_that_gives_other_than_one_for_each_is_named(name: str, said: str) -> None:
    async def run() -> None:
        scorer, reward = _scorer(name)
        prompt = Prompt(index=7, token_ids=[1], text="2 + 2?", label="4")
        try:
            if scorer.scores_groups:
                await scorer.score_group(prompt, ["a", "b", "c"])
            await asyncio.gather(*(scorer.score(prompt, text) for text in "abc"))
        finally:
            reward.close()  # type: ignore[attr-defined]

    with pytest.raises(RewardError) as refused:
        asyncio.run(run())
    assert said in refused.value.why


def test_what_it_prints_is_no_reply() -> None:
    assert _score("lying", ["4"]) == [0.5]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("backtracking", "did not return within 1 s"),
        ("blocking", "did not return within 1 s"),
        ("never", "did not return within 1 s"),
        ("leaving", "its process ended with exit code 1"),
        ("killed", "its process ended with signal SIGKILL; it printed last:\nabout to be killed"),
        ("exiting", "SystemExit(3)"),
        ("chatty", "it printed more than 8"),
        ("greedy", "MemoryError"),
        ("raising", "IndexError: list index out of range"),
        ("not_a_number", "must be finite, but is nan"),
        ("a_text", "must be a number, but is '1.0'"),
        ("nothing", "must be a number, but is None"),
        ("closing", "its process ended with"),
        ("spoiling", "it wrote what is no reply: b'garbage"),
        ("judge", "KeyError: 'judge'"),
    ],
)
def test_what_is_wrong_is_named(name: str, said: str) -> None:
    timeout_s = 1.0 if "did not return" in said else 30.0
    with pytest.raises(RewardError, match=f"the reward `{ROOM}:{name}` failed") as refused:
        _score(name, ["4"] * 3, reward_timeout_s=timeout_s, reward_memory_gib=2.0)
    assert said in refused.value.why
    assert "prompt 7" in refused.value.what


@pytest.mark.parametrize(
    ("name", "line"), [("backtracking", "fullmatch"), ("blocking", "time.sleep(600)")]
)
def test_where_it_hangs_is_said_with_its_line(name: str, line: str) -> None:
    source = Path(__file__).with_name("bad_rewards.py").read_text().splitlines()
    number = next(n for n, text in enumerate(source, 1) if line in text)
    with pytest.raises(RewardError) as refused:
        _score(name, ["4"], reward_timeout_s=5.0)  # it has begun by then
    assert f'bad_rewards.py", line {number} in {name}' in refused.value.why


def test_what_it_has_begun_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with pytest.raises(RewardError) as refused:
        _score("breeding", [str(file)], reward_timeout_s=5.0)
    assert "did not return" in refused.value.why
    assert_gone(int(file.read_text()))


def test_calls_of_a_worker_that_another_call_blocked_are_asked_again() -> None:
    async def run() -> list[object]:
        scorer, reward = _scorer("never_for_five", reward_timeout_s=6.0)
        prompt = Prompt(index=7, token_ids=[1], text="2 + 2?", label="4")
        try:
            slow = asyncio.create_task(scorer.score(prompt, "5"))
            await asyncio.sleep(5.5)
            quick = asyncio.create_task(scorer.score(prompt, "4"))
            return list(await asyncio.gather(slow, quick, return_exceptions=True))
        finally:
            reward.close()  # type: ignore[attr-defined]

    slow, quick = asyncio.run(run())
    assert isinstance(slow, RewardError) and "did not return" in slow.why
    assert quick == 1.0


def test_a_worker_that_reads_no_more_holds_nobody_up() -> None:
    """64 calls of 64 KiB each are far more than a pipe holds."""
    with pytest.raises(RewardError, match="failed on a response") as refused:
        _score("deaf", ["x" * 65_536] * 64, reward_timeout_s=3.0)
    assert "did not return within 3 s" in refused.value.why


def test_calls_that_wait_for_others_get_further_workers() -> None:
    async def run() -> int:
        scorer, reward = _scorer("slow")
        prompt = Prompt(index=7, token_ids=[1], text="2 + 2?", label="4")
        calls = [asyncio.create_task(scorer.score(prompt, "4")) for _ in range(12)]
        try:
            assert await asyncio.gather(*calls) == [1.0] * 12
            return len(reward.pool.workers)  # type: ignore[attr-defined]
        finally:
            reward.close()  # type: ignore[attr-defined]

    assert asyncio.run(run()) > 4
