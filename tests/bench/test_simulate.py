"""Published figures beside the simulator: numbers are fitted on the named rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from simulate import GOAL, SOURCES, fit, roll


def test_two_planted_numbers_are_found() -> None:
    def predict(numbers: tuple[float, float], rows: Sequence[str], scale: int) -> dict[str, float]:
        a, b = numbers
        return {"sum": a + b, "product": a * b, "other": a / b}

    source = replace(
        roll(),
        names=("a", "b"),
        start=(5.0, 3.0),
        published={"sum": 12.0, "product": 20.0, "other": 99.0},
        fitted=("sum", "product"),
        predict=predict,
    )
    assert fit(source) == pytest.approx((10, 2), rel=0.05)


def test_at_most_two_numbers_are_fitted_and_a_row_is_left_to_predict() -> None:
    for make in SOURCES.values():
        source = make()
        assert len(source.names) <= 2 and len(source.fitted) <= 2
        assert set(source.fitted) < set(source.published)


def test_environments_by_themselves_come_out_within_the_goal() -> None:
    source = roll()
    got = source.predict(fit(source), list(source.published), 1)
    for row, published in source.published.items():
        assert got[row] == pytest.approx(published, rel=GOAL), row
