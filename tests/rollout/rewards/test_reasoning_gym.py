"""Tests of reasoning-gym's tasks, by its own scorers in the reward's processes."""

from __future__ import annotations

import asyncio
import importlib.util
import json

import pytest

from milescli.core.errors import RecipeError
from milescli.core.types import Prompt
from milescli.recipe.schema import Rollout
from milescli.rollout.contract import check_reward
from milescli.rollout.rewards import label_checks, load_rewards, reasoning_gym_tasks, scorer_of
from milescli.rollout.rewards.reasoning_gym_tasks import reasoning_gym
from milescli.rollout.rewards.scoring import Response

ROLLOUT = Rollout(reward="reasoning_gym")
there = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason="needs pip install 'miles-cli[reasoning-gym]'",
)


def _label(dataset: str) -> tuple[str, str]:
    """(label, its answer)"""
    import reasoning_gym as library

    entry = library.create_dataset(dataset, size=1, seed=3)[0]
    return json.dumps({"dataset": dataset, "entry": entry}), entry["answer"]


@there
@pytest.mark.parametrize("dataset", ["leg_counting", "countdown", "arc_agi", "zebra_puzzles"])
def test_the_library_scores_its_own_answers(dataset: str) -> None:
    label, answer = _label(dataset)
    assert reasoning_gym.check_label(label) is None
    right = f"<think>so</think> it is <answer>{answer}</answer>"
    assert reasoning_gym(prompt="", response=right, label=label) == 1.0
    assert reasoning_gym(prompt="", response="<answer>no</answer>", label=label) < 0.1


@there
@pytest.mark.parametrize(
    "said", ["<answer>{}</answer>", r"so \boxed{{{}}}", "so\n#### {}", "{}", "<think>7</think>{}"]
)
def test_the_answer_is_found_where_it_is_put(said: str) -> None:
    label, answer = _label("leg_counting")
    assert reasoning_gym(prompt="", response=said.format(answer), label=label) == 1.0


@there
def test_it_bears_the_contract() -> None:
    assert check_reward(reasoning_gym, examples=reasoning_gym.examples) == [1.0, 0.0]


@there
@pytest.mark.slow
def test_it_is_scored_and_its_labels_are_checked_in_processes_of_their_own() -> None:
    label, answer = _label("leg_counting")
    prompt = Prompt(index=0, token_ids=[1], text="", label=label)

    async def score() -> list[float]:
        scorer = scorer_of(ROLLOUT)
        scores = [scorer.score_response(prompt, Response(text=text)) for text in (answer, "x")]
        return [score.reward for score in await asyncio.gather(*scores)]

    assert asyncio.run(score()) == [1.0, 0.0]
    assert label_checks(ROLLOUT)["reasoning_gym"].check_label("{}").startswith("it is not JSON")


@there
@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("7", "it is not JSON like"),
        ('{"dataset": "leg_counting"}', "it is not JSON like"),
        (
            '{"dataset": "leg_count", "entry": {"answer": "7", "metadata": {}}}',
            "no data set `leg_count`; nearest is `leg_counting`",
        ),
        (
            '{"dataset": "composite", "entry": {"answer": "7", "metadata": {}}}',
            "cannot be scored separately",
        ),
    ],
)
def test_a_label_that_cannot_be_scored_is_a_fault(label: str, reason: str) -> None:
    assert reason in str(reasoning_gym.check_label(label))


def test_without_the_library_it_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reasoning_gym_tasks, "find_spec", lambda _: None)
    with pytest.raises(RecipeError) as refused:
        load_rewards(ROLLOUT)
    assert refused.value.fixes == ["pip install 'miles-cli[reasoning-gym]'"]
