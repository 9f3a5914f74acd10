"""Tests of a scoring server of the user's: one response, a whole group, and what is no reward."""

from __future__ import annotations

import asyncio

import pytest

from milescli.core.errors import RewardError
from milescli.core.types import Prompt
from milescli.recipe.rewards import RemoteSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.rewards import scorer_of
from milescli.rollout.rewards.scoring import Response, Score
from tests.endpoint_server import Asked, Reply, quick_retries, serving

__all__ = ["quick_retries"]
PROMPT = Prompt(index=5, token_ids=[1], text="2 + 2?", label="4")


def _rollout(url: str, **settings: object) -> Rollout:
    remote = RemoteSettings(url=url, **settings)  # type: ignore[arg-type]
    return Rollout(reward={"remote": 1.0, "length": 0.0}, remote_reward=remote)


def _scores(rollout: Rollout, texts: list[str]) -> list[Score]:
    async def run() -> list[Score]:
        scorer = scorer_of(rollout)
        responses = [Response(text=text, num_tokens=1) for text in texts]
        async with asyncio.timeout(60):
            if scorer.scores_groups:
                return await scorer.score_responses(PROMPT, responses)
            return await asyncio.gather(*(scorer.score_response(PROMPT, one) for one in responses))

    return asyncio.run(run())


def _by_label(asked: Asked, number: int) -> Reply:
    body = asked.body
    if "responses" in body:
        return Reply({"rewards": [float(one == body["label"]) for one in body["responses"]]})
    return Reply({"reward": float(body["response"] == body["label"])})


def test_each_response_is_sent_and_its_reward_taken() -> None:
    with serving(_by_label) as server:
        assert [score.reward for score in _scores(_rollout(server.url), ["4", "5"])] == [1.0, 0.0]
    bodies = sorted(server.asked, key=lambda asked: asked.body["response"])
    assert bodies[0].body == {"prompt": "2 + 2?", "response": "4", "label": "4"}


def test_a_group_is_sent_at_once_and_is_a_part_beside_others() -> None:
    with serving(_by_label) as server:
        scores = _scores(_rollout(server.url, group=True), ["5", "4", "4"])
    assert [score.parts["remote"] for score in scores] == [0.0, 1.0, 1.0]
    assert len(server.asked) == 1 and server.asked[0].body["responses"] == ["5", "4", "4"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"reward": "1.0"}, "must be a number"),
        ('{"reward": NaN}', "must be finite"),
        ({}, "must be a number, but is None"),
        ([1.0], "must be a number, but is None"),
    ],
)
def test_what_is_no_reward_stops_the_run(body: object, why: str) -> None:
    with (
        serving(lambda asked, number: Reply(body)) as server,
        pytest.raises(RewardError) as refused,
    ):
        _scores(_rollout(server.url), ["4"])
    assert why in refused.value.why and "`remote` failed at" in refused.value.what


@pytest.mark.parametrize("rewards", [[1.0], None, "11"])
def test_a_group_wants_a_reward_for_each(rewards: object) -> None:
    with (
        serving(lambda asked, number: Reply({"rewards": rewards})) as server,
        pytest.raises(RewardError, match="it was given 2 responses"),
    ):
        _scores(_rollout(server.url, group=True), ["4", "5"])


@pytest.mark.usefixtures("quick_retries")
def test_it_is_tried_again_within_its_own_bounds() -> None:
    def flaky(asked: Asked, number: int) -> Reply:
        return Reply(silent=True) if number == 0 else _by_label(asked, number)

    with serving(flaky) as server:
        rollout = _rollout(server.url, timeout_s=3.0, retries=1)
        assert _scores(rollout, ["4"])[0].reward == 1.0
