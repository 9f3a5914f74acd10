"""Tests of the GSM8K grader."""

from __future__ import annotations

import pytest

from milescli.rollout.rewards.math.gsm8k import gsm8k

LABEL = "48 + 24 = <<48+24=72>>72\n#### 72"


def _grade(response: str, label: str = LABEL) -> float:
    return gsm8k(prompt="", response=response, label=label)


@pytest.mark.parametrize(
    "response",
    [
        "#### 72",
        "so\n####72",
        "#### 72.",
        "#### 72.00",
        "#### $72",
        "#### 72 clips",
        "#### 1\n#### 72",
        "####  72\nThank you!",
        "#### 72%",
        "#### **72**",
        "#### `72`",
        "#### \\boxed{72}",
        "#### Answer: 72",
        "#### The answer is 72",
        "#### So the answer is 72.\n\nI checked it twice.",
        "#### 72\n#### The answer explained\nIt adds up.",
        "#### Answer\n72",
        "####\n72",
        "#### Step 1\nAdd.\n#### 72",
        "#### 72\n#### Why it is so\nIt adds up.",
        "<think>\n#### 5\n</think>\n#### 72",
    ],
)
def test_the_right_number_after_the_last_mark_is_accepted(response: str) -> None:
    assert _grade(response) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "72",
        "the answer is 72",
        "",
        "####",
        "#### 72</think>The answer is 73.",
        "<think>\n#### 72",
        "#### 2. Add them\n48 + 24 = 72",
        "#### 73",
        "#### 72\n#### 73",
        "#### 72\n####",
        "#### -72",
        "#### about 72",
        "#### 7,2",
        "#### 72/1",
        "#### 72e0",
        "#### 720",
        "#### 72,5",
        "#### 72.5",
        "#### 7 2",
    ],
)
def test_anything_else_is_refused(response: str) -> None:
    assert _grade(response) == 0.0


@pytest.mark.parametrize(
    ("label", "response"),
    [
        ("#### 1,234", "#### 1234"),
        ("#### 1234", "#### $1,234.00"),
        ("#### -3", "#### -$3"),
        ("#### 0.5", "#### .50"),
        ("5", "#### 5"),
    ],
)
def test_numbers_are_compared_by_value(label: str, response: str) -> None:
    assert _grade(response, label) == 1.0


@pytest.mark.parametrize("label", ["", "#### none", None])
def test_a_label_without_a_number_is_the_fault_of_the_data(label: str | None) -> None:
    with pytest.raises(ValueError, match="label"):
        gsm8k(prompt="", response="#### 1", label=label)


def test_a_label_without_a_number_is_a_fault_before_any_response() -> None:
    assert gsm8k.check_label("so\n#### 7 days") is None
    assert gsm8k.check_label("#### none") == "it holds no number"
    assert gsm8k.check_label(None) == "`gsm8k` needs a label"


@pytest.mark.parametrize("final", ["-10", "1,080", "109,200,000", "0", "5600"])
def test_the_forms_of_the_real_data_set_grade_themselves_right(final: str) -> None:
    assert _grade(f"x = <<1*1=1>>1\n#### {final}", f"y\n#### {final}") == 1.0
