"""Tests of what a response must look like, and how long it may be."""

from __future__ import annotations

import asyncio

import pytest

from milescli.core.types import Prompt
from milescli.recipe.rewards import FormatSettings, LengthSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.rewards import scorer_of
from milescli.rollout.rewards.scoring import Response
from milescli.rollout.rewards.text.unlabelled import format as form


def _score(response: str, **settings: object) -> float:
    rollout = Rollout(format=FormatSettings(**settings))  # type: ignore[arg-type]
    return form.with_settings(rollout)(prompt="", response=response, label=None)


@pytest.mark.parametrize(
    ("response", "by"),
    [
        (r"so \boxed{7}", {"any": 1, "boxed": 1, "mark": 0, "none": 1}),
        ("so\n#### 7", {"any": 1, "boxed": 0, "mark": 1, "none": 1}),
        ("so 7", {"any": 0, "boxed": 0, "mark": 0, "none": 1}),
        (r"\boxed{} ####", {"any": 0, "boxed": 0, "mark": 0, "none": 1}),
        ("####\n7", {"any": 0, "boxed": 0, "mark": 0, "none": 1}),
        (" \n", {"any": 0, "boxed": 0, "mark": 0, "none": 0}),
    ],
)
def test_an_answer_must_stand_where_it_is_looked_for(response: str, by: dict[str, int]) -> None:
    assert {answer: _score(response, answer=answer) for answer in by} == by


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (r"<think>3 + 4</think>\boxed{7}", 1.0),
        (r"3 + 4</think>\boxed{7}", 1.0),
        ("<think>3 + 4</think>\n#### 7", 1.0),
        (r"\boxed{7}", 0.0),
        (r"<think>\boxed{7}</think>", 0.0),
        (r"<think>\boxed{7}</think>seven", 0.0),
        (r"<think></think>\boxed{7}", 0.0),
        (r"first <think>3</think>\boxed{7}", 0.0),
        (r"<think>3</think><think>4</think>\boxed{7}", 0.0),
        (r"<think>3<think>4</think>\boxed{7}", 0.0),
        (r"<think>3</think>4</think>\boxed{7}", 0.0),
    ],
)
def test_thinking_is_closed_once_and_the_answer_comes_after_it(response: str, score: float) -> None:
    assert _score(response, think_tags=True) == score


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0.0), (100, 0.0), (125, -0.25), (200, -1.0), (999, -1.0)]
)
def test_the_length_penalty_rises_from_target_to_limit(num_tokens: int, penalty: float) -> None:
    rollout = Rollout(
        reward={"length": 1.0},
        length=LengthSettings(target_tokens=100),
        max_response_tokens=200,
    )
    prompt = Prompt(index=0, token_ids=[1], text="")
    response = Response(text="x", num_tokens=num_tokens)
    assert asyncio.run(scorer_of(rollout).score_response(prompt, response)).reward == penalty
