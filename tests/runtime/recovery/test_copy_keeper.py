"""The process that holds copies: what it keeps, and how much memory it takes."""

from __future__ import annotations

import numpy as np

from milescli.runtime.recovery.copy_keeper import CopyKeeper

SIZES = [6, 0, 3]


def _fill(keeper: CopyKeeper, copy: int, rank: int, *, keep: int = 0) -> None:
    """With bytes of ten times its number and the rank's."""
    keeper.begin(copy, rank, SIZES, keep=keep)
    for section, size in enumerate(SIZES):
        for offset in range(0, size, 4):
            part = np.full(min(4, size - offset), 10 * copy + rank, dtype=np.uint8)
            keeper.write(copy, rank, section, offset, part)


def _memory(keeper: CopyKeeper, copy: int, rank: int) -> int:
    return keeper.read(copy, rank, 0, 0, 6).__array_interface__["data"][0]


def test_a_copy_is_read_as_it_was_written() -> None:
    keeper = CopyKeeper()
    for rank in (0, 1):
        _fill(keeper, 1, rank)
    assert [keeper.read(1, rank, 0, 2, 4).tolist() for rank in (0, 1)] == [[10] * 4, [11] * 4]
    assert keeper.read(1, 1, 2, 0, 3).tolist() == [11] * 3


def test_a_copy_that_is_coming_in_leaves_the_one_that_counts_alone() -> None:
    keeper = CopyKeeper()
    _fill(keeper, 1, 0)
    _fill(keeper, 2, 0, keep=1)
    assert keeper.read(1, 0, 0, 0, 6).tolist() == [10] * 6
    assert keeper.read(2, 0, 0, 0, 6).tolist() == [20] * 6


def test_memory_is_that_of_two_copies_whatever_is_given_up() -> None:
    keeper, places, counts = CopyKeeper(), set[int](), 0
    for copy in range(1, 9):
        _fill(keeper, copy, 0, keep=counts)
        places.add(_memory(keeper, copy, 0))
        if copy % 3:  # every third never arrives whole
            counts = copy
        assert keeper.read(counts, 0, 0, 0, 6).tolist() == [10 * counts] * 6
    assert len(places) == 2


def test_what_comes_late_of_a_copy_that_was_given_up_is_not_written() -> None:
    keeper = CopyKeeper()
    _fill(keeper, 1, 0)
    keeper.begin(2, 0, SIZES, keep=1)
    keeper.begin(3, 0, SIZES, keep=1)
    keeper.write(3, 0, 0, 0, np.full(6, 3, dtype=np.uint8))
    keeper.write(2, 0, 0, 0, np.full(6, 2, dtype=np.uint8))
    assert keeper.read(3, 0, 0, 0, 6).tolist() == [3] * 6
