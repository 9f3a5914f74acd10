"""Sharing lengths out: everything once, few microbatches, even ranks."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.train.packing import distribute, even_split, first_fit, longest_first


def _log_normal(sigma: float, count: int = 512, *, seed: int = 0) -> list[int]:
    values = np.random.default_rng(seed).lognormal(6, sigma, count)
    return [max(int(value), 1) for value in values]


def _first_fit_decreasing(lengths: list[int], cap: int) -> list[list[int]]:
    """By the textbook."""
    room, bins = list[int](), list[list[int]]()
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        place = next((place for place, free in enumerate(room) if free >= length), len(room))
        if place == len(room):
            room.append(cap)
            bins.append([])
        room[place] = room[place] - length if length <= cap else -1
        bins[place].append(index)
    return [sorted(bin_) for bin_ in bins]


def _karmarkar_karp(lengths: list[int], num_bins: int) -> list[int]:
    """Sums, largest first, by the textbook."""
    heap = [
        (-length, index, [length] + [0] * (num_bins - 1)) for index, length in enumerate(lengths)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, serial, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        joined = sorted((a + b for a, b in zip(one, reversed(other), strict=True)), reverse=True)
        heapq.heappush(heap, (joined[-1] - joined[0], serial, joined))
    return heap[0][2]


lengths_ = st.lists(st.integers(0, 300), min_size=1, max_size=60)


@settings(max_examples=500, deadline=None)
@given(lengths_, st.integers(1, 400))
def test_first_fit_makes_the_bins_of_the_textbook(lengths: list[int], cap: int) -> None:
    assert first_fit(lengths, cap) == _first_fit_decreasing(lengths, cap)


@settings(max_examples=200, deadline=None)
@given(lengths_, st.integers(1, 9), st.integers(1, 400))
def test_everything_once_under_the_cap_in_no_more_bins_than_first_fit(
    lengths: list[int], num_ranks: int, cap: int
) -> None:
    shared = distribute(lengths, num_ranks=num_ranks, cap=cap)
    bins = [bin_ for rank in shared for bin_ in rank]
    assert sorted(index for bin_ in bins for index in bin_) == list(range(len(lengths)))
    assert len(shared) == num_ranks and len({len(rank) for rank in shared}) == 1
    for bin_ in bins:
        assert len(bin_) <= 1 or sum(lengths[index] for index in bin_) <= cap
    bound = -(-len(_first_fit_decreasing(lengths, cap)) // num_ranks) * num_ranks
    assert len(bins) <= bound


@pytest.mark.parametrize("sigma", [0.8, 1.2, 1.6])
@pytest.mark.parametrize(("count", "num_ranks"), [(512, 8), (64, 8), (40, 8), (256, 2)])
def test_ranks_are_as_even_as_by_karmarkar_and_karp(
    sigma: float, count: int, num_ranks: int
) -> None:
    lengths = _log_normal(sigma, count)
    sums = [sum(lengths[index] for index in bin_) for bin_ in even_split(lengths, num_ranks)]
    assert max(sums) <= 1.001 * max(_karmarkar_karp(lengths, num_ranks))


@pytest.mark.parametrize("sigma", [0.8, 1.2])
def test_ranks_stay_even_where_microbatches_have_a_cap(sigma: float) -> None:
    lengths = _log_normal(sigma)
    cap = max(8192, max(lengths))
    shared = distribute(lengths, num_ranks=8, cap=cap)
    sums = [sum(lengths[index] for bin_ in rank for index in bin_) for rank in shared]
    assert max(sums) / np.mean(sums) < 1.0001


def test_very_many_lengths_are_shared_out_evenly_too() -> None:
    lengths = _log_normal(1.0, 8192)
    sums = [sum(lengths[index] for index in bin_) for bin_ in even_split(lengths, 8)]
    assert max(sums) / np.mean(sums) < 1.0001


def test_the_longest_goes_first_into_the_emptiest_bin() -> None:
    assert longest_first([3, 9, 4, 4], 2) == [[1], [0, 2, 3]]
