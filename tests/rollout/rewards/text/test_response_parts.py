r"""Tests of finding the last `\boxed{}` of a response."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.rollout.rewards.text.response_parts import last_boxed

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
