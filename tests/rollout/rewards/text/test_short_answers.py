"""Tests of `exact_match`, of SQuAD's normalisation, of `f1`, and of `exact_match` with it."""

from __future__ import annotations

import pytest

from milescli.recipe.rewards import MatchSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.rewards.text.short_answers import exact_match, f1, f1_of, normalized


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("The  Eiffel Tower!", "eiffel tower"),
        ("a cat, an owl and the dog", "cat owl and dog"),
        ("it's", "its"),
        ("Another theory", "another theory"),
        ("The", ""),
    ],
)
def test_normalisation_leaves_small_words_apart_from_articles(text: str, wanted: str) -> None:
    assert normalized(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted", "score"),
    [
        ("the Eiffel Tower", "Eiffel tower", 1.0),
        ("in Paris France", "Paris", 0.5),
        ("Paris", "in Paris France", 0.5),
        ("London", "Paris", 0.0),
        ("paris paris", "paris", 2 / 3),
        ("", "Paris", 0.0),
        ("the", "a", 1.0),
    ],
)
def test_f1_is_of_common_words(text: str, wanted: str, score: float) -> None:
    assert f1_of(text, wanted) == pytest.approx(score)


def test_the_best_of_several_labels_counts() -> None:
    label = '["Paris", "the city of Paris"]'
    assert f1(prompt="", response="city of Paris", label=label) == 1.0
    assert f1.check_label('["", "!"]') == f1.check_label("the") == "it holds no word"
    assert f1.check_label(label) is None


@pytest.mark.parametrize(
    ("where", "response", "score"),
    [
        ("tags", "I think <answer>London</answer>, no: <answer> Paris </answer>.", 1.0),
        ("tags", "Paris", 0.0),
        ("boxed", r"so \boxed{Paris}", 1.0),
        ("last_line", "thinking about London\nParis\n", 1.0),
        ("whole", "Paris", 1.0),
    ],
)
def test_the_part_that_is_compared_can_be_chosen(where: str, response: str, score: float) -> None:
    rollout = Rollout(match=MatchSettings(answer=where))  # type: ignore[arg-type]
    for reward in (f1, exact_match):
        asked = reward.with_settings(rollout)
        assert asked(prompt="", response=response, label="Paris") == score


def test_exact_match_is_strict_unless_told() -> None:
    squad = exact_match.with_settings(Rollout(match=MatchSettings(normalize="squad")))
    assert exact_match(prompt="", response="the Paris.", label="Paris") == 0.0
    assert squad(prompt="", response="the Paris.", label="Paris") == 1.0
    assert squad(prompt="", response="Paris", label='["London", "Paris"]') == 1.0
    assert squad(prompt="", response="in Paris", label="Paris") == 0.0
    assert exact_match(prompt="", response='["Paris"]', label='["Paris"]') == 1.0
    assert squad.check_label("the") is not None and exact_match.check_label("the") is None


@pytest.mark.parametrize(
    ("response", "reward"), [("yes", 1.0), (" yes\n", 1.0), ("Yes", 0.0), ("yes.", 0.0), ("", 0.0)]
)
def test_only_the_label_itself_is_accepted(response: str, reward: float) -> None:
    assert exact_match(prompt="", response=response, label="yes ") == reward


def test_a_missing_label_raises() -> None:
    with pytest.raises(ValueError, match="needs a label"):
        exact_match(prompt="", response="", label=None)


def test_a_missing_label_is_a_fault_before_any_response() -> None:
    assert exact_match.check_label(None) == "`exact_match` needs a label"
    assert exact_match.check_label("yes") is None
