"""Figures of a set of prompts, from samples whose figures are counted by hand."""

from __future__ import annotations

import pytest

from milescli.core.types import Group, Prompt
from milescli.recipe.schema import Evaluation, Rollout
from milescli.rollout.evaluation.metrics import pass_at_k
from milescli.rollout.evaluation.scores import scores_of
from milescli.rollout.rewards import answer_extractor
from tests.samples import make_sample, make_trajectory


def _group(index: int, *said: tuple[str, float]) -> Group:
    samples = [
        make_sample(make_trajectory([1], [2]), reward=reward, index=at, text=text)
        for at, (text, reward) in enumerate(said)
    ]
    return Group(prompt=Prompt(index=index, token_ids=[1], text=f"{index}?"), samples=samples)


GROUPS = [
    _group(0, ("#### 7", 1.0), ("#### 7.0", 1.0), ("#### 8", 0.0), ("nothing", 0.0)),
    _group(5, ("#### 1", 0.0), ("#### 1", 0.0), ("#### 2", 1.0), ("#### 3", 0.0)),
]


def test_figures_are_means_over_prompts() -> None:
    answer = answer_extractor(Rollout(reward="gsm8k"))
    figures = scores_of(GROUPS, ks=[1, 2, 4], answer=answer).estimates
    values = {name: round(one.value, 6) for name, one in figures.items()}
    assert values == {
        "avg@4": 0.375,
        "pass@1": 0.375,
        "pass@2": round((5 / 6 + 1 / 2) / 2, 6),
        "pass@4": 1.0,
        # of six pairs: 7 and 7 once, 7 and nothing twice, 7 and 8 twice, won by half;
        # 2 beside another three times, won by half
        "maj@2": round(((1 + 2 + 1) / 6 + (3 / 2) / 6) / 2, 6),
        "maj@4": 0.5,
    }


def test_pass_at_k_is_of_as_many_samples_as_every_prompt_has() -> None:
    groups = [*GROUPS, _group(9, ("#### 7", 1.0), ("#### 8", 0.0))]
    figures = scores_of(groups, ks=[1, 2, 4], answer=lambda text: text).estimates
    assert list(figures) == ["avg@2", "pass@1", "pass@2", "maj@2"]
    named = pass_at_k(groups=groups, settings=Evaluation(samples_per_prompt=4))
    assert list(named) == ["pass_at_1", "pass_at_2"]


def test_domains_have_their_own_accuracy_and_prompts_may_have_none() -> None:
    groups = [*GROUPS, _group(9, ("#### 7", 1.0), ("", 1.0), ("", 1.0), ("", 1.0))]
    domains = scores_of(groups, ks=[1], domains={0: "sums", 5: "odd", 7: "not asked"}).domains
    assert {name: (one.num_prompts, one.accuracy.value) for name, one in domains.items()} == {
        "odd": (1, 0.25),
        "sums": (1, 0.5),
    }


def test_without_a_reward_that_reads_answers_there_is_no_majority() -> None:
    assert answer_extractor(Rollout(reward="judge")) is None
    figures = scores_of(
        GROUPS, ks=[1, 4], answer=answer_extractor(Rollout(reward="length"))
    ).estimates
    assert list(figures) == ["avg@4", "pass@1", "pass@4"]


@pytest.mark.parametrize(
    ("reward", "response", "stated"),
    [
        ("gsm8k", "so\n#### $1,200.50 each", "1200.5"),
        ("gsm8k", "1200", None),
        ("math", r"it is \boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        ("math", "I do not know", None),
        ("multiple_choice", "The answer is (b).", "B"),
        ("multiple_choice", "A or B", None),
        ("exact_match", " yes ", "yes"),
        ("exact_match", " ", None),
        ({"format": 0.5, "gsm8k": 1.0}, "#### 3", "3"),
    ],
)
def test_a_majority_counts_what_the_reward_compares(
    reward: str, response: str, stated: str | None
) -> None:
    answer = answer_extractor(Rollout(reward=reward))
    assert answer is not None and answer(response) == stated
