"""Tests of labels of the reward `code`, and of what counts as equal; no sandbox is needed."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from milescli.rollout.rewards.code.asserts import Ungradable, split_asserts
from milescli.rollout.rewards.code.label_tests import (
    names_of,
    read_label,
    same_output,
    same_value,
)


@pytest.mark.parametrize(
    ("label", "why"),
    [
        ({}, "`inputs` is not a list"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "0 inputs"),
        ({"inputs": [1], "outputs": ["1"]}, "not a list of texts"),
        ({"fn_name": "a b", "inputs": [[1]], "outputs": [1]}, "not a name"),
        ({"fn_name": "f", "inputs": ["x y"], "outputs": [1]}, "no lines of JSON"),
        ({"asserts": []}, "not a list of texts"),
        ({"asserts": ["x = 1"]}, "asserts nothing"),
        ({"asserts": ["assert f("]}, "not valid Python"),
        ({"asserts": ["for i in range(3):\n    assert f(i)"]}, "inside of `for i in range"),
        ({"asserts": ["assert all(f(i) for i in range(3))"]}, "inside of a loop"),
        ({"asserts": ["import pytest\nassert f(1)"]}, "not in the sandbox"),
        ({"asserts": ["import solution.tree\nassert f(1)"]}, "single module"),
    ],
)
def test_a_label_that_cannot_be_graded_says_why(label: dict[str, Any], why: str) -> None:
    with pytest.raises(Ungradable, match=why):
        read_label(json.dumps(label))


@pytest.mark.parametrize("label", [None, "", "{", "[1]", "3", "[" * 100_000])
def test_what_is_no_object_is_refused(label: str | None) -> None:
    with pytest.raises(Ungradable):
        read_label(label)


def test_only_the_questions_go_to_the_code() -> None:
    parted = split_asserts(["expected = 5\ndata = [1]\nassert f(data) == expected and f(2) > 7"])
    assert parted.response_steps == [{"do": "data = [1]"}, {"value": "f(data)"}, {"value": "f(2)"}]
    assert parted.judge_steps[-1]["judge"] == "_v1 == expected and _v2 > 7"


@pytest.mark.parametrize(
    ("label", "names"),
    [
        ({"inputs": ["1"], "outputs": ["1"]}, set()),
        ({"fn_name": "add", "inputs": [[1]], "outputs": [1]}, {"add"}),
        ({"asserts": ["x = [1]\nassert len(add(x)) == 1", "assert Box(2).area"]}, {"add", "Box"}),
        ({"asserts": ["import solution as s, math\nassert s.add(1)"]}, {"add"}),
        ({"asserts": ["import main\nadd = main.add(1)\nassert add"]}, {"add"}),
        ({"asserts": ["from main import add as plus\nassert plus(1)"]}, {"add"}),
    ],
)
def test_a_label_says_which_names_the_code_defines(label: dict[str, Any], names: set[str]) -> None:
    assert names_of(read_label(json.dumps(label))) == names


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 \n2\n\n", "1\n2", True),
        ("1\n\n2", "1\n2", False),
        ("0.3333333", "0.33333333", True),
        ("1.0", "1", False),
        ("1", "1.0", True),
        ("nan", "1.5", False),
        ("", "", True),
        ("a 0.5", "b 0.5", False),
    ],
)
def test_output_is_compared_by_lines(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    ("have", "want", "same"),
    [
        (True, 1, False),
        (1, 1.0, True),
        ({"tuple": [1, {"set": [2]}]}, [1, [2]], True),
        ({"set": [10, 2, 1]}, [1, 2, 10], True),
        ({"set": [10, 2, 1]}, [1, 2, 11], False),
        ({"set": [1]}, [1, 1], False),
        ({"frozenset": [0.3, {"tuple": ["b", 1]}, "a"]}, ["a", ["b", 1], 0.3000000001], True),
        ([10, 2, 1], [1, 2, 10], False),
        ({"dict": [[1, "a"]]}, {"1": "a"}, True),
        ([1], 1, True),
        ({"dict": 5}, {}, False),
        (None, [], False),
        (10**400, 1.5, False),
        ({"set": [10**400]}, [1.5], False),
        ({"set": [[10**5000]]}, [1], False),
        (functools.reduce(lambda inner, _: [inner], range(5000), 1), [1], False),
    ],
)
def test_results_are_compared_as_json_has_them(have: object, want: object, same: bool) -> None:
    assert same_value(have, want) is same
