"""Student's t against scipy's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from milescli.report.student import t_quantile, two_sided_p


@given(t=st.floats(-50, 50), freedom=st.integers(1, 400))
def test_chances_are_those_of_scipy(t: float, freedom: int) -> None:
    # of the beta function: scipy's own `t.sf` is off by 1e-9 next to 0 with one degree of freedom
    share = special.betaincc(0.5, freedom / 2, t * t / (freedom + t * t))
    assert two_sided_p(t, freedom) == pytest.approx(share, abs=1e-12, rel=1e-9)


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 30, 250])
@pytest.mark.parametrize("share", [0.6, 0.9, 0.975, 0.999])
def test_quantiles_are_those_of_scipy(share: float, freedom: int) -> None:
    assert t_quantile(share, freedom) == pytest.approx(stats.t.ppf(share, freedom), rel=1e-9)
