"""Tests of extracting the answer, or the code, from a response."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.rollout.rewards.extraction import (
    after_thinking,
    code_of,
    last_boxed,
    part_of,
    without_markdown,
)

BALANCED = st.recursive(
    st.sampled_from(["7", "x", " ", "\\frac12", "\\{", "\\}", "$"]),
    lambda inner: st.lists(inner, min_size=1, max_size=4).map(
        lambda parts: f"{{{''.join(parts)}}}"
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{3} ... wait ... \boxed{7}", "7"),
        (r"\boxed{3} and \boxed{7}", "7"),
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\text{therefore \boxed{7}}", "7"),
        (r"\boxed{3}, no: \fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{7} } so { it } is }", "7"),
        (r"\boxed{7}, or is it \boxed{8", "7"),
        (r"\boxed{is it \boxed{7}", "7"),
        (r"\boxed{7}, written in \boxed{} as asked", "7"),
        (r"\boxed{7}, written in \boxed{ { } } as asked", "7"),
        (r"\boxed{3 + \boxed{4}}", "3 + {4}"),
        (r"\boxed{\boxed{7}}", "{7}"),
        (r"{ \boxed{7}", "7"),
        (r"\\boxed{7}", "7"),
        (r"\boxed{\begin{cases}1\\{x}\end{cases}}", r"\begin{cases}1\\{x}\end{cases}"),
    ],
)
def test_the_last_complete_box_that_holds_anything_counts(text: str, content: str) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    "text", ["", "7", r"\boxed{7", r"\boxed{}", r"\boxed 7", r"\boxed7}", "{7}"]
)
def test_without_a_complete_box_there_is_none(text: str) -> None:
    assert last_boxed(text) is None


@given(
    st.text(alphabet="a{}\\ $"), BALANCED, st.sampled_from(["", " }", " {", " so {x}", r" \boxed{"])
)
def test_whatever_stands_around_it_a_box_is_read_whole(before: str, inner: str, after: str) -> None:
    text = f"{before.rstrip(chr(92))} \\boxed{{7{inner}}}{after}"
    assert last_boxed(text) == f"7{inner}".strip()


def test_a_long_response_of_boxes_that_never_close_is_read_in_one_pass() -> None:
    assert last_boxed(r"\boxed{" * 200_000 + "7}") == "7"


@pytest.mark.parametrize(
    ("response", "rest"),
    [
        ("7", "7"),
        ("<think>a</think>7", "7"),
        ("opened by the template</think>7", "7"),
        ("<think>a</think>I closed </think> above", "I closed </think> above"),
        ("<think>a</think>x\n<think>b</think>7", "7"),
        ("I write <think> and go on", "I write <think> and go on"),
        ("<think>never closed", ""),
        ("<think>a</think>7\n<think>again", ""),
        ("[THINK]a[/THINK]7", "7"),
        ("</think></think> <think>7", "</think> <think>7"),
        ("</think> \n <think>7", ""),
        ("so <think> is " * 100_000, "so <think> is " * 100_000),
        ("<|channel|>analysis<|message|>never at an end", ""),
        ("◁think▷a◁/think▷7", "7"),
        ("<|channel>thought\na<channel|>7", "7"),
        ("<|channel>thought\nnever at an end", ""),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>7",
            "7",
        ),
    ],
)
def test_what_follows_the_thinking_is_the_answer(response: str, rest: str) -> None:
    assert after_thinking(response) == rest


def test_parts_that_are_compared_are_never_in_the_thinking() -> None:
    response = "<think><answer>1</answer></think><answer>2</answer> \\boxed{3}\n4"
    wanted = {"tags": "2", "boxed": "3", "last_line": "4"}
    assert {where: part_of(response, where) for where in wanted} == wanted
    assert part_of("<think>x</think>\n7\n", "whole") == "7"


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("**7**", "7"),
        ("so **7 apples**.", "so 7 apples."),
        ("***7*** __8__ *9* _10_ `11`", "7 8 9 10 11"),
        ("2**3**2 and 5*c*d", "2**3**2 and 5*c*d"),
        (r"$x_1 + y_2$ and \sum_{i}_a", r"$x_1 + y_2$ and \sum_{i}_a"),
        ("a ** b ** c", "a ** b ** c"),
    ],
)
def test_markdown_is_taken_off_and_mathematics_stays(text: str, plain: str) -> None:
    assert without_markdown(text) == plain


F = "```"
ADD = "def add(a, b):\n    return a + b\n"
SOLUTION = "class Solution:\n    def f(self):\n        return 1\n"
MAIN = "a, b = map(int, input().split())\nprint(a + b)\n"
BROKEN_BY_A_FENCE = f"x = '''\n{F}\n'''\n{MAIN}"


@pytest.mark.parametrize(
    ("response", "names", "code"),
    [
        ("a = 1", "", "a = 1"),
        (f"{F}python\na\n{F}\nor\n{F}py\nb\n{F}\nend", "", "b\n"),
        (f"{F}\na\n{F}", "", "a\n"),
        (f"text\n{F}python\nnot closed", "", "not closed"),
        (f"{F}python\n{F}", "", ""),
        (f"{F}python\n{ADD}{F}\nUse:\n{F}python\nprint(add(1, 2))\n{F}", "add", ADD),
        (f"{F}python\n{MAIN}{F}\nPrints:\n{F}\n3\n{F}", "", MAIN),
        (f"{F}python\n{MAIN}{F}\n{F}text\n3\n{F}\n{F}bash\npython a.py\n{F}", "", MAIN),
        (f"{F}python\nprint(0)\n{F}\nFixed:\n{F}python\n{MAIN}{F}", "", MAIN),
        (f"{MAIN}{F}", "", MAIN),
        (f"~~~python\n{MAIN}~~~", "", MAIN),
        (f"1. do\n   {F}python\n   a = add()\n     # b\n   {F}", "", "a = add()\n  # b\n"),
        (f"{F}python\n{BROKEN_BY_A_FENCE}{F}", "", BROKEN_BY_A_FENCE),
        (f"<think>\n{F}python\nprint(0)\n{F}\n</think>\n{F}python\n{MAIN}{F}", "", MAIN),
        (f"{F}python\n{SOLUTION}{F}\n{F}python\ns = Solution()\n{F}", "f", SOLUTION),
    ],
)
def test_the_block_that_defines_what_is_asked_is_the_code(
    response: str, names: str, code: str
) -> None:
    assert code_of(response, names=names.split()) == code
