"""Tests of putting every label before the reward, once, before a run starts."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest

from milescli.core.errors import DataError, RewardError, WaitTimeout
from milescli.core.types import Prompt
from milescli.recipe.schema import Rollout
from milescli.rollout.base import RewardFn
from milescli.rollout.rewards import load_rewards
from milescli.rollout.rewards.label_check import check_labels


class Reward:
    """Its labels must not hold a "b"; counts how often it was asked."""

    def __init__(self) -> None:
        self.asked: Counter[str | None] = Counter()

    def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        raise AssertionError("no response is scored here")

    def check_label(self, label: str | None) -> str | None:
        self.asked[label] += 1
        return "it holds a b" if label is None or "b" in label else None


def _check(reward: object, labels: list[str | None], **options: object) -> list[str]:
    """Row i of the file has label i; returns what was said."""
    said: list[str] = []
    prompts = [
        Prompt(index=index, token_ids=[], text="?", label=label)
        for index, label in enumerate(labels)
    ]
    check_labels(
        reward,  # type: ignore[arg-type]
        prompts,
        name="mine",
        path=Path("data/train.jsonl"),
        say=said.append,
        **options,  # type: ignore[arg-type]
    )
    return said


def test_equal_labels_are_put_before_the_reward_once() -> None:
    reward = Reward()
    assert _check(reward, ["a", "c", "a"] * 100) == []
    assert reward.asked == {"a": 1, "c": 1}


def test_rows_whose_label_cannot_be_graded_are_named_by_line_before_anything_starts() -> None:
    labels = ["a", "b1", "a", *["b2"] * 7]
    with pytest.raises(DataError) as error:
        _check(Reward(), labels)
    assert (
        error.value.what == "8 of 10 prompts of data/train.jsonl have a label that `mine` refuses"
    )
    assert error.value.why.startswith(
        "line 2: the label 'b1': it holds a b; line 4: the label 'b2': it holds a b; "
    )
    assert error.value.why.endswith("; and 3 more")
    assert error.value.fixes[0] == "sed -n 2p data/train.jsonl   # fix or remove these rows"
    assert "--set data.label_key" in error.value.fixes[1]


def test_a_missing_label_is_named_too() -> None:
    with pytest.raises(DataError, match=r"line 2: no label: it holds a b"):
        _check(Reward(), ["a", None])


def test_of_a_long_label_the_end_is_shown_which_is_the_result() -> None:
    with pytest.raises(DataError, match=r"line 1: the label '\.\.\.a+b': it"):
        _check(Reward(), ["a" * 5000 + "b"])


def test_a_reward_without_the_check_grades_whatever_comes() -> None:
    assert _check(lambda **_: 1.0, ["a", None]) == []


def test_a_check_that_raises_is_named_with_its_traceback() -> None:
    reward = Reward()
    reward.check_label = lambda label: 1 / 0  # type: ignore[method-assign,assignment]
    with pytest.raises(RewardError, match=r"`mine` failed on the label 'a'[\s\S]*ZeroDivision"):
        _check(reward, ["a"])


def test_a_check_that_hangs_is_named_with_its_label() -> None:
    reward, release = Reward(), threading.Event()
    reward.check_label = lambda label: release.wait() and None  # type: ignore[method-assign]
    with pytest.raises(WaitTimeout, match=r"0 of 2 different labels .* were checked") as error:
        _check(reward, ["a", "a", "c"], timeout_s=0.2, say_after_s=0.0)
    release.set()
    assert "label 'a'" in error.value.why


def test_a_long_check_says_what_it_does() -> None:
    reward, said = Reward(), threading.Event()
    reward.check_label = lambda label: said.wait(120.0) and None  # type: ignore[method-assign]
    prompts = [Prompt(index=0, token_ids=[], text="?", label="a")]
    texts: list[str] = []

    def say(text: str) -> None:
        texts.append(text)
        said.set()

    check_labels(
        reward,
        prompts,
        name="mine",
        path=Path("x.jsonl"),
        say=say,
        say_after_s=0.0,
    )
    assert texts == ["checking that `mine` can grade 1 different labels of x.jsonl"]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("math", ["36", "\\$36", "\\frac{1}{2}", "so #### 7"], "#### "),
        ("gsm8k", ["36", "so\n#### 7"], "seven"),
        ("exact_match", ["anything"], None),
    ],
)
def test_the_built_in_rewards_refuse_what_they_cannot_grade(
    name: str, good: list[str], bad: str | None
) -> None:
    reward: RewardFn = load_rewards(Rollout(reward=name))[name]
    assert _check(reward, [*good], say_after_s=1000.0) == []
    with pytest.raises(DataError, match=f"1 of {len(good) + 1} prompts"):
        _check(reward, [*good, bad], say_after_s=1000.0)
