r"""Tests of what the `math` reward takes for equal, both ways; in this process, by what its own
processes do."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from milescli.rollout.rewards.extraction import stated_answer
from milescli.rollout.rewards.math.reward import math
from milescli.rollout.rewards.math.worker import grade
from tests.rollout.rewards.math.other_pairs import CONTRADICTORY, UNEQUAL
from tests.rollout.rewards.math.pairs import EQUAL

PIECES = (
    *("7", "1", "x", r"\frac", "{", "}", "(", ")", "[", "]", r"\{", r"\}", ",", "=", "<", " or "),
    *(
        r"\le ",
        r"\pm ",
        r"\sqrt",
        "^",
        "_",
        r"\cup ",
        r"\in ",
        r"\text{cm}",
        "&",
        r"\\",
        r"\%",
        "$",
    ),
    *(r"\begin{pmatrix}", r"\end{pmatrix}", r"\infty", "...", "!", "|", "-", "/", ":", "½", "\x00"),
    *(r"\sum_{i=1}^{n}", r"\max(", r"\frac{d}{di}"),
    *(r"\boxed{", "i", r"\mathbb{R}", r"\emptyset", r"\overline{3}", "####", "\\"),
)


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    """As in the reward's processes: the library warns of every call."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def _pairs(table: str) -> list[tuple[str, str]]:
    return [
        (one.strip(), other.strip())
        for one, _, other in (line.partition(" ~ ") for line in table.strip().splitlines())
    ]


@pytest.mark.parametrize(("one", "other"), _pairs(EQUAL))
def test_equal_answers_are_equal_both_ways(one: str, other: str) -> None:
    assert grade(other, f"\\boxed{{{one}}}") == grade(one, f"\\boxed{{{other}}}") == 1.0


@pytest.mark.parametrize(("one", "other"), _pairs(UNEQUAL))
def test_other_answers_are_other_both_ways(one: str, other: str) -> None:
    assert grade(other, f"\\boxed{{{one}}}") == grade(one, f"\\boxed{{{other}}}") == 0.0


@pytest.mark.parametrize("one", [one for one, _ in _pairs(UNEQUAL)])
def test_every_answer_equals_itself(one: str) -> None:
    assert grade(one, f"\\boxed{{{one}}}") == 1.0


@pytest.mark.parametrize("answer", CONTRADICTORY)
def test_a_contradiction_scores_nothing_and_is_no_label(answer: str) -> None:
    assert grade("7", f"\\boxed{{{answer}}}") == grade("8", answer) == 0.0
    assert math.check_label(answer) is not None


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("7 or 8", "7 or 8"),
        ("It is 7 or 8", "7, 8"),
        ("so it can be $7$ or $8$.", "7, 8"),
        ("First 3, then 4.\n\nThe answer is 5, because 3 < 4.", "5"),
        ("The final answer is $x = 5$. I hope it is correct.", "x = 5"),
        ("**Answer:** 1,234", "1,234"),
        ("3 + 4 = 7\nA: 7", "7"),
        ("3 + 4 = 7\n#### 7 clips\nThank you", "7 clips"),
        ("The answer is 7 cm.", "7 cm"),
        ("the answer is Tuesday.", "Tuesday"),
        ("2 apples and then she has 12 of them in 3 baskets", "3"),
        (r"so \(x = 2\) and \[y = 3\]", "x = 2, y = 3"),
        ("nothing to say", ""),
        (r"x = 1 \\[4pt] so \(y = 3\) or \]", "y = 3"),
        (r"\( a \[ b " * 20_000 + "7", "7"),
        (r"x &= y \\[4pt] " * 20_000 + "1", "1"),
        ("**A: 7**\nThat took 3 steps", "7"),
        ("Q: 3 + 4?\nA: 7\nchecked 2 times", "7"),
        ("The answer is **73**.", "73"),
        ("**Answer: 73**", "73"),
        ("### Final Answer\n**73**", "73"),
        ("Answer: `73`", "73"),
        ("Answer: __73__", "73"),
        ("Final answer: 73 ✅", "73"),
        ("The answer is **x+1**.", "x+1"),
        ("The answer is 5*c and not 2**3", "5*c and not 2**3"),
        ("<answer> 73 </answer>, in 5 steps", "73"),
        ("#### Step 1\nAdd.\n#### Step 2: conclude\nThe answer is 72.", "72"),
        ('{"answer": 73, "steps": 4}', "73"),
        ("#### The answer is 72", "72"),
        ("3" * 200_000 + "x", ""),
        ("The answer" + "\n" * 200_000 + "is 7", "7"),
        ("\\boxed{3}" + " " * 200_000 + "x \\boxed{4}", "4"),
        (r"\boxed{3} and \boxed{4}", "3, 4"),
        (r"maybe \boxed{42}</think>The answer is 43.", "43"),
        (r"<think> maybe \boxed{42}", ""),
        (r"<think>\boxed{1}</think>so \boxed{2}<think>\boxed{3}</think>\boxed{4}", "4"),
    ],
)
def test_without_a_box_the_answer_is_what_is_called_so_or_comes_last(
    response: str, answer: str
) -> None:
    assert stated_answer(response) == answer


@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
@example(r"\pmod{" + "1" * 5000 + "}")
@settings(max_examples=300, deadline=None)
def test_nonsense_is_graded_and_never_equals_what_it_does_not_hold(text: str) -> None:
    assert grade("\\sqrt{29}", f"\\boxed{{{text}}}") == 0.0
    assert grade("\\text{Tuesday}", text) == 0.0
