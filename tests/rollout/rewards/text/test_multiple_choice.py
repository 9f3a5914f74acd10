"""Tests of which letter a response chooses."""

from __future__ import annotations

import pytest

from milescli.rollout.rewards.text.multiple_choice import multiple_choice


def _grade(response: str, label: str = "B") -> float:
    return multiple_choice(prompt="", response=response, label=label)


@pytest.mark.parametrize(
    "response",
    [
        "B",
        "b",
        "(B)",
        "B.",
        "**B**",
        "B) Paris",
        "(B) Paris, the capital",
        r"so \boxed{B}",
        r"\boxed{\text{B}}",
        r"\boxed{(B)}",
        r"A looks right, but no: \boxed{b}",
        "The answer is B.",
        "The correct answer is (B) because A is wrong.",
        "The answer is option B",
        "A is wrong.\nAnswer: B",
        "A is wrong.\n**Answer:** B) Paris",
        "First: the answer is A. No, the answer is B.",
        "reasoning\n#### B",
        "reasoning <answer>B</answer>",
        "reasoning about A\nB",
        "<think>the answer is A</think>B",
        "The best choice is B since it fits",
        "Option B is correct",
        "A is wrong. B is the correct answer.",
        "Is A correct, or A is right? B is the correct one.",
        "Is A correct, or A is correct " * 10_000 + "?\nB is correct",
        "B, Paris.",
        "### B",
        r"\(B\)",
        "答案：B",  # noqa: RUF001
        "Answer：B",  # noqa: RUF001
        '{"answer": "B"}',
        '```json\n{"choice": "B"}\n```',
        "**B. Paris**",
        "The answer is\n\nB",
        "B\n\nExplanation: it is the capital, so A is wrong.",
        "Thus, option (B).",
        "the answer is therefore B",
        "I'd go with B.",
        "<answer>\nB. Paris\n</answer>",
        "[THINK]it is A[/THINK]B",
    ],
)
def test_the_chosen_letter_is_accepted(response: str) -> None:
    assert _grade(response) == 1.0
    assert _grade(response, "(b)") == _grade(response, "B) Paris") == 1.0
    assert _grade(response, "A") == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "A or B",
        "The answer is A or B.",
        "The answer is A, B",
        "not B, I think it is something else",
        "B is a letter of the alphabet",
        "Bob",
        "BB",
        r"\boxed{A}, though B is near",
        r"\boxed{}",
        "the answer is between A and B",
        "The answer is not B.",
        "<think>B</think>",
        "Option B is incorrect.",
        "B is not the correct answer",
        "<think>the answer is B",
    ],
)
def test_anything_else_is_refused(response: str) -> None:
    assert _grade(response) == 0.0


@pytest.mark.parametrize(
    "response", ["A, C", "C and A", "AC", r"\boxed{A,C}", "The answer is A & C"]
)
def test_several_letters_must_all_be_chosen(response: str) -> None:
    assert _grade(response, "A, C") == 1.0
    assert _grade(response, "A") == _grade(response, "A, B, C") == 0.0


def test_an_article_is_no_choice() -> None:
    assert _grade("The answer is a big dog", "A") == 0.0


def test_a_label_that_is_no_letter_is_a_fault() -> None:
    assert multiple_choice.check_label("Paris") == "it is not a letter"
    assert multiple_choice.check_label("A or B") == "it is not a letter"
    assert multiple_choice.check_label(None) == "`multiple_choice` needs a label"
    with pytest.raises(ValueError, match="not a letter"):
        _grade("B", "Paris")
