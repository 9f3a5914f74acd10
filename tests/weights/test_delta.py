"""What changed of weights, coded and applied."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milescli.weights.delta import apply, encode

WORDS = st.integers(-(2**15), 2**15 - 1)


@given(st.lists(st.tuples(WORDS, st.none() | WORDS | st.integers(-3, 3)), max_size=600))
def test_changes_turn_the_old_words_into_the_new_ones(pairs):
    old = np.array([first for first, _ in pairs], np.int16)
    new = np.array([first if second is None else second for first, second in pairs], np.int16)
    delta, raw = encode(old, new)
    words = old.copy()
    apply(delta, raw, words)
    assert np.array_equal(words, new)
    assert delta.num_steps == int((old != new).sum())


@given(st.integers(1, 3000))
def test_a_change_may_be_far_from_the_one_before(place):
    old = np.zeros(3001, np.int16)
    new = old.copy()
    new[[0, place]] = 1
    delta, raw = encode(old, new)
    assert len(raw) == 2 + (place - 1) // 255 + 2
    apply(delta, raw, old)
    assert np.array_equal(old, new)


def test_a_step_of_the_last_bit_costs_two_bytes_also_across_zero():
    numbers = torch.tensor([1.0, -1.0, 3e-40, -3e-40, 65280.0]).bfloat16()
    old = numbers.view(torch.int16).numpy()
    new = old + np.array([1, 1, -1, 1, 0], np.int16)
    delta, raw = encode(old, new)
    assert (delta.num_steps, delta.num_far, len(raw)) == (4, 0, 8)


def test_changes_of_other_weights_are_refused():
    old = np.arange(100, dtype=np.int16)
    delta, raw = encode(old, old + (old % 10 == 0))
    with pytest.raises(ValueError, match="other weights"):
        apply(delta, raw, old + 1)
