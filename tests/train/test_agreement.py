"""Judging log-probs: what rounding explains, what routing explains, what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from milescli.train.agreement import Agreement, judge

NUM_TOKENS = 256


def drawn(scale: float, seed: int) -> np.ndarray:
    """[NUM_TOKENS] differences as rounding makes them: larger where a token is less likely."""
    chance = np.random.default_rng(seed)
    return scale * chance.standard_normal(NUM_TOKENS) * chance.exponential(size=NUM_TOKENS)


TRAINER = -np.random.default_rng(0).exponential(size=NUM_TOKENS)


def judged(engine: np.ndarray, *, floor: float, has_experts: bool = False) -> Agreement:
    rounded = TRAINER + drawn(floor, seed=1)
    return judge(TRAINER + engine, TRAINER, rounded, has_experts=has_experts).agreement


@pytest.mark.parametrize("floor", [5e-6, 0.05])
def test_as_far_apart_as_rounding_moves_the_trainer_is_equal(floor: float) -> None:
    assert judged(drawn(1.5 * floor, seed=2), floor=floor) is Agreement.EQUAL
    assert judged(drawn(3.5 * floor, seed=2), floor=floor) is Agreement.EXPLAINED
    assert judged(drawn(10 * floor, seed=2), floor=floor) is Agreement.WRONG


def test_equal_log_probs_agree_whatever_the_floor() -> None:
    assert judged(np.zeros(NUM_TOKENS), floor=0.0) is Agreement.EQUAL
    assert judged(drawn(1e-6, seed=2), floor=0.0) is Agreement.EQUAL


def test_a_tenth_of_the_tokens_far_off_is_wrong_without_experts_and_explained_with_them() -> None:
    engine = drawn(1e-3, seed=2)
    engine[::8] += 0.4
    assert judged(engine, floor=1e-3) is Agreement.WRONG
    assert judged(engine, floor=1e-3, has_experts=True) is Agreement.EXPLAINED


def test_one_token_in_a_hundred_far_off_is_wrong_without_experts() -> None:
    engine = drawn(1e-5, seed=2)
    engine[[7, 99]] += 0.3
    assert judged(engine, floor=1e-5) is Agreement.WRONG
    assert judged(engine, floor=1e-5, has_experts=True) is Agreement.EQUAL


def test_most_tokens_far_off_is_wrong_with_experts_too() -> None:
    assert judged(drawn(0.3, seed=2), floor=1e-3, has_experts=True) is Agreement.WRONG


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_what_is_not_finite_is_wrong(value: float) -> None:
    engine = np.zeros(NUM_TOKENS)
    engine[3] = value
    for has_experts in (False, True):
        assert judged(engine, floor=0.1, has_experts=has_experts) is Agreement.WRONG
