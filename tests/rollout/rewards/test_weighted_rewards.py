"""Several rewards with weights: their sum, their parts as figures of a step, and who is named when
one fails."""

from __future__ import annotations

import asyncio

import pytest

from milescli.core.errors import RewardError
from milescli.core.types import Prompt, WeightVersion
from milescli.recipe.schema import Rollout
from milescli.rollout.collect.collector import Collector
from milescli.rollout.rewards import scorer_of
from milescli.rollout.rewards.scoring import Response, Score, Scorer, WeightedScorer
from tests.rollout.engines import ScriptedEngine, make_episodes, make_recipe, make_source

PROMPT = Prompt(index=3, token_ids=[1], text="2 + 2?", label="4")


def _length(*, prompt: str, response: str, label: str | None) -> float:
    return float(len(response))


async def _is_four(*, prompt: str, response: str, label: str | None) -> float:
    return float(response == label)


def _broken(*, prompt: str, response: str, label: str | None) -> float:
    raise KeyError("no such field")


class _Ranked:
    """Sees all responses to a prompt."""

    max_concurrency, scores_groups = 4, True

    async def score_group(self, *, responses: list[str], **_: object) -> list[float]:
        return [float(place) for place, _ in enumerate(responses)]

    async def score(self, **_: object) -> float:
        raise AssertionError("it scores groups")


def _weighted(**parts: tuple[object, float]) -> WeightedScorer:
    return WeightedScorer(
        {
            name: (Scorer(reward, name=name, timeout_s=120.0), weight)  # type: ignore[arg-type]
            for name, (reward, weight) in parts.items()
        }
    )


def test_the_reward_is_the_weighted_sum_and_the_parts_are_kept() -> None:
    scorer = _weighted(right=(_is_four, 1.0), length=(_length, -0.5))
    score = asyncio.run(scorer.score_response(PROMPT, Response(text="4")))
    assert score == Score(reward=0.5, parts={"right": 1.0, "length": 1.0})


def test_a_part_that_sees_groups_makes_all_wait_for_the_group() -> None:
    scorer = _weighted(right=(_is_four, 1.0), rank=(_Ranked(), 10.0))
    assert scorer.scores_groups
    responses = [Response(text="4"), Response(text="5")]
    scores = asyncio.run(scorer.score_responses(PROMPT, responses))
    assert [score.reward for score in scores] == [1.0, 10.0]
    assert scores[1].parts == {"right": 0.0, "rank": 1.0}


def test_a_part_that_fails_is_named() -> None:
    scorer = _weighted(right=(_is_four, 1.0), mine=(_broken, 1.0))
    with pytest.raises(RewardError, match="`mine` failed on a response to prompt 3"):
        asyncio.run(scorer.score_response(PROMPT, Response(text="4")))


def test_a_step_has_the_mean_of_each_part() -> None:
    scorer = _weighted(right=(_is_four, 1.0), length=(_length, 0.25))
    recipe = make_recipe()
    episodes = make_episodes(ScriptedEngine(), scorer=scorer)  # type: ignore[arg-type]
    collector = Collector(make_source(), episodes, recipe=recipe)
    groups = asyncio.run(collector.take(1, version=WeightVersion(0)))
    parts = collector.stats.reward_parts
    assert parts["length"] == 1.0 and list(parts) == ["right", "length"]
    assert collector.stats.reward_mean == pytest.approx(parts["right"] + 0.25)
    sample = groups[0].samples[0]
    assert sample.reward == sample.reward_parts["right"] + 0.25


def test_a_single_reward_has_no_parts() -> None:
    score = asyncio.run(
        scorer_of(Rollout(reward="gsm8k")).score_response(PROMPT, Response(text="so it is\n#### 4"))
    )
    assert score == Score(reward=1.0)


def test_a_recipe_names_several() -> None:
    scorer = scorer_of(Rollout(reward={"gsm8k": 1.0, "exact_match": 0.5}))
    score = asyncio.run(scorer.score_response(PROMPT, Response(text="#### 4")))
    assert score == Score(reward=1.0, parts={"gsm8k": 1.0, "exact_match": 0.0})
