"""Ticks and thinned points, for any numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from milescli.pictures.scale import thinned, ticks


@given(low=st.floats(-1e6, 1e6), span=st.floats(0, 1e6), whole=st.booleans())
def test_ticks_hold_both_ends_and_are_few(low: float, span: float, whole: bool) -> None:
    places = ticks(low, low + span, whole=whole)
    step = places[1] - places[0]
    assert 2 <= len(places) <= 9
    assert places[0] <= low + 1e-6 * step and places[-1] >= low + span - 1e-6 * step


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), most=st.integers(4, 80))
def test_thinned_points_are_few_in_order_and_hold_both_ends_and_extremes(
    values: list[float], most: int
) -> None:
    points = list(enumerate(values))
    kept = thinned(points, most)
    assert len(kept) <= most and kept == sorted(kept, key=lambda point: point[0])
    assert kept[0] == points[0] and kept[-1] == points[-1] and set(kept) <= set(points)
    assert {min(values), max(values)} <= {value for _, value in kept}
