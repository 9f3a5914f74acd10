"""Lengths have the mean that was asked for, after the cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.simulate.lengths import LogNormal, Recorded


@given(share=st.floats(0.02, 0.9), sigma=st.floats(0, 1.5))
def test_the_mean_is_that_of_the_cut_lengths(share: float, sigma: float) -> None:
    lengths = LogNormal(mean=10_000 * share, sigma=sigma, longest=10_000)
    drawn = lengths.draw(np.random.default_rng(0), groups=4_000, samples=8)
    assert drawn.shape == (4_000, 8) and drawn.min() >= 1 and drawn.max() <= 10_000
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.05)


def test_without_sigma_all_are_equal() -> None:
    drawn = LogNormal(mean=7, sigma=0, longest=9).draw(
        np.random.default_rng(0), groups=2, samples=3
    )
    assert (drawn == 7).all()


@pytest.mark.parametrize(
    "lengths",
    [
        Recorded(groups=[[4000, 8000], [100, 6000]]),
        LogNormal(mean=3000, sigma=1.0, longest=10_000),
        LogNormal(mean=3000, sigma=0, longest=10_000),
    ],
)
def test_a_recipe_cuts_the_lengths_of_a_run(lengths: Recorded | LogNormal) -> None:
    cut = lengths.cut(512)
    drawn = cut.draw(np.random.default_rng(0), groups=4_000, samples=2)
    assert drawn.max() == 512 and drawn.mean() == pytest.approx(cut.mean, rel=0.05)
    assert lengths.cut(10_000) == lengths


def test_recorded_groups_stay_together() -> None:
    lengths = Recorded(groups=[[1, 2], [30, 40]])
    drawn = lengths.draw(np.random.default_rng(0), groups=100, samples=2)
    assert {tuple(row) for row in drawn.tolist()} == {(1, 2), (30, 40)}
    assert lengths.mean == 73 / 4
    others = lengths.draw(np.random.default_rng(0), groups=100, samples=4)
    assert all(set(row) <= {1, 2} or set(row) <= {30, 40} for row in others.tolist())
