"""Estimators against their definitions, counted out."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.rollout.evaluation.statistics import (
    compared,
    estimated,
    in_words,
    majority_at,
    mcnemar,
    pass_at,
)

few = settings(max_examples=60, deadline=None)
ANSWERS = st.lists(st.sampled_from(["right", "x", "y", "z", None]), min_size=1, max_size=7)


@few
@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations([True] * right + [False] * (n - right), k))
    counted = fmean(any(subset) for subset in subsets)
    assert pass_at(k, num_samples=n, num_right=right) == pytest.approx(counted)


@few
@given(ANSWERS, st.data())
def test_the_majority_of_k_is_right_as_often_as_in_all_subsets(
    answers: list[str | None], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(answers)))
    counts = Counter(answers)
    silent, right = counts.pop(None, 0), counts.pop("right", 0)
    told = majority_at(k, num_right=right, wrong=list(counts.values()), num_silent=silent)
    assert told == pytest.approx(fmean(map(_share_won, combinations(answers, k))))


def _share_won(subset: tuple[str | None, ...]) -> float:
    votes = Counter(answer for answer in subset if answer is not None)
    first = [answer for answer, count in votes.items() if count == max(votes.values())]
    return first.count("right") / len(first) if first else 0.0


@few
@given(st.integers(0, 12), st.integers(0, 12))
def test_mcnemar_counts_all_outcomes_at_least_as_uneven(only_a: int, only_b: int) -> None:
    num, seen = only_a + only_b, abs(only_a - only_b)
    uneven = sum(math.comb(num, heads) for heads in range(num + 1) if abs(2 * heads - num) >= seen)
    assert mcnemar(only_a, only_b) == pytest.approx(uneven / 2**num)


def test_mcnemar_on_figures_that_are_published() -> None:
    assert mcnemar(1, 9) == pytest.approx(22 / 1024)
    assert mcnemar(0, 6) == pytest.approx(2 / 64)
    assert mcnemar(0, 0) == mcnemar(5, 5) == 1.0


@few
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=40))
def test_an_interval_is_the_same_each_time_and_within_what_was_seen(values: list[float]) -> None:
    one = estimated(values, seed=3)
    assert one == estimated(values, seed=3)
    assert one.value == pytest.approx(fmean(values))
    assert min(values) - 1e-9 <= one.low <= one.high <= max(values) + 1e-9


def test_an_interval_of_many_prompts_is_the_normal_one() -> None:
    values = [1.0] * 300 + [0.0] * 700
    half = 1.96 * math.sqrt(0.3 * 0.7 / 1000)
    one = estimated(values)
    assert one.low == pytest.approx(0.3 - half, abs=0.004)
    assert one.high == pytest.approx(0.3 + half, abs=0.004)
    assert estimated([0.5] * 9).low == estimated([0.5] * 9).high == 0.5


def test_right_or_wrong_is_compared_by_mcnemar_and_anything_else_by_bootstrap() -> None:
    a, b = [1.0] * 15 + [0.0] * 5, [1.0] * 5 + [0.0] * 15
    told = compared(a, b)
    assert (told.test, told.num_a_better, told.num_b_better) == ("mcnemar", 10, 0)
    assert told.p_value == pytest.approx(2 / 1024) and told.estimate.value == 0.5
    by_parts = compared([0.5 * one for one in a], [0.5 * one for one in b])
    assert by_parts.test == "bootstrap" and by_parts.p_value < 0.01
    assert compared(a, a).p_value == 1.0


def test_a_sentence_names_the_better_one_only_where_chance_is_unlikely() -> None:
    a, b = [1.0] * 20, [1.0] * 8 + [0.0] * 12
    assert in_words(compared(a, b), a="A", b="B").startswith("A is better than B, ")
    assert in_words(compared(b, a), a="A", b="B").startswith("B is better than A, ")
    equal = in_words(compared([1.0, 0.0], [0.0, 1.0]), a="A", b="B")
    assert equal.startswith("No difference can be told from chance.") and "p = 1 " in equal
