"""Estimators against their definitions, counted out."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations, product
from operator import mul
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from milescli.rollout.evaluation.statistics import (
    compare_paired,
    describe_difference,
    estimate_mean,
    majority_at,
    mcnemar,
    pass_at,
    permutation_p,
    t_quantile,
    two_sided_p,
    wilson,
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
@given(st.integers(0, 300), st.integers(0, 300))
def test_mcnemar_counts_all_outcomes_at_least_as_uneven(only_a: int, only_b: int) -> None:
    num, seen = only_a + only_b, abs(only_a - only_b)
    uneven = sum(math.comb(num, heads) for heads in range(num + 1) if abs(2 * heads - num) >= seen)
    assert mcnemar(only_a, only_b) == pytest.approx(uneven / 2**num)


@pytest.mark.parametrize(("k", "num_silent"), [(256, 0), (276, 20)])
def test_of_hundreds_of_different_answers_each_wins_as_often(k: int, num_silent: int) -> None:
    assert majority_at(k, num_right=1, wrong=[1] * 255, num_silent=num_silent) == 1 / 256


def test_mcnemar_on_figures_that_are_published() -> None:
    assert mcnemar(1, 9) == pytest.approx(22 / 1024)
    assert mcnemar(0, 6) == pytest.approx(2 / 64)
    assert mcnemar(0, 0) == mcnemar(5, 5) == 1.0
    assert mcnemar(3000, 3100) == pytest.approx(stats.binomtest(3000, 6100).pvalue)


@few
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=40))
def test_an_interval_holds_the_mean_and_of_shares_is_within_0_and_1(values: list[float]) -> None:
    one = estimate_mean(values, samples_per_prompt=4)
    assert one.value == pytest.approx(fmean(values))
    assert one.low - 1e-9 <= one.value <= one.high + 1e-9
    if min(values) >= 0 and max(values) <= 1:
        assert 0 <= one.low < one.high <= 1


def test_an_interval_of_many_prompts_is_the_normal_one() -> None:
    values = [1.0] * 300 + [0.0] * 700
    half = 1.96 * math.sqrt(0.3 * 0.7 / 1000)
    one = estimate_mean(values)
    assert one.low == pytest.approx(0.3 - half, abs=0.004)
    assert one.high == pytest.approx(0.3 + half, abs=0.004)


def test_ten_of_ten_are_not_certainly_all() -> None:
    # Wilson 1927 as scipy has it: binomtest(10, 10).proportion_ci(method="wilson")
    assert estimate_mean([1.0] * 10).low == pytest.approx(0.7224672001371107)
    assert estimate_mean([0.0] * 10).high == pytest.approx(1 - 0.7224672001371107)
    assert compare_paired([1.0] * 10, [1.0] * 10).estimate.high > 0.15


@pytest.mark.parametrize(("num", "share"), [(30, 0.95), (30, 0.5), (100, 0.9)])
def test_an_interval_of_single_answers_covers_as_often_as_it_says(num: int, share: float) -> None:
    draw, covered = np.random.default_rng(num), 0
    for _ in range(1000):
        one = estimate_mean((draw.random(num) < share).astype(float).tolist())
        covered += one.low <= share <= one.high
    assert 0.92 <= covered / 1000 <= 0.98  # a percentile bootstrap: 0.78 of the first


@pytest.mark.parametrize(
    ("num", "samples", "a", "b"), [(10, 4, 2, 1), (30, 4, 8, 0.5), (30, 8, 50, 50), (100, 16, 1, 1)]
)
def test_an_interval_of_several_samples_covers_as_often_as_it_says(
    num: int, samples: int, a: float, b: float
) -> None:
    draw, covered, width = np.random.default_rng(num), 0, 0.0
    for _ in range(500):
        right = draw.binomial(samples, draw.beta(a, b, num)) / samples
        one = estimate_mean(right.tolist(), samples_per_prompt=samples)
        covered += one.low <= a / (a + b) <= one.high
        width += one.high - one.low
    low, high = wilson(0.5, num)
    assert 0.9 <= covered / 500 <= 0.98 and width / 500 < high - low


@pytest.mark.parametrize("num", [5, 10, 30])
def test_equal_models_are_seldom_called_different(num: int) -> None:
    draw, seen = np.random.default_rng(num), 0
    for _ in range(500):
        chances = draw.random(num)
        both = [(draw.binomial(4, chances) / 4).tolist() for _ in range(2)]
        seen += compare_paired(*both).p_value < 0.05
    assert seen / 500 <= 0.06  # a paired bootstrap: 0.13 of 5 prompts, 0.08 of 10


@few
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_the_permutation_test_looks_at_all_choices_of_signs(gains: list[int]) -> None:
    sums = [sum(map(mul, signs, gains)) for signs in product((1, -1), repeat=len(gains))]
    as_far = sum(abs(total) >= abs(sum(gains)) for total in sums)
    assert permutation_p(gains) == pytest.approx(as_far / len(sums))
    many = [gain / 4 for gain in gains] * 10
    assert permutation_p(many) == permutation_p(
        many
    )  # beyond what can be enumerated: always the same draws


def test_right_or_wrong_is_compared_by_mcnemar_and_anything_else_by_permutation() -> None:
    a, b = [1.0] * 15 + [0.0] * 5, [1.0] * 5 + [0.0] * 15
    told = compare_paired(a, b)
    assert (told.test, told.num_a_better, told.num_b_better) == ("mcnemar", 10, 0)
    assert told.p_value == pytest.approx(2 / 1024) and told.estimate.value == 0.5
    by_parts = compare_paired([0.5 * one for one in a], [0.5 * one for one in b])
    assert by_parts.test == "permutation" and by_parts.p_value < 0.01
    assert compare_paired(a, a).p_value == 1.0


def test_a_sentence_names_the_better_one_only_where_chance_is_unlikely() -> None:
    a, b = [1.0] * 20, [1.0] * 8 + [0.0] * 12
    assert describe_difference(compare_paired(a, b), a="A", b="B").startswith(
        "A scores higher than B, "
    )
    assert describe_difference(compare_paired(b, a), a="A", b="B").startswith(
        "B scores higher than A, "
    )
    equal = describe_difference(compare_paired([1.0, 0.0], [0.0, 1.0]), a="A", b="B")
    assert equal.startswith("No difference can be told from chance.") and "p = 1 " in equal


@given(t=st.floats(-50, 50), freedom=st.integers(1, 400))
def test_chances_are_those_of_scipy(t: float, freedom: int) -> None:
    # of the beta function: scipy's own `t.sf` is off by 1e-9 next to 0 with one degree of freedom
    share = special.betaincc(0.5, freedom / 2, t * t / (freedom + t * t))
    assert two_sided_p(t, freedom) == pytest.approx(share, abs=1e-12, rel=1e-9)


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 30, 250])
@pytest.mark.parametrize("share", [0.6, 0.9, 0.975, 0.999])
def test_quantiles_are_those_of_scipy(share: float, freedom: int) -> None:
    assert t_quantile(share, freedom) == pytest.approx(stats.t.ppf(share, freedom), rel=1e-9)
