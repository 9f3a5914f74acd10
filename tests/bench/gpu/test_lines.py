"""How a figure is judged."""

from __future__ import annotations

import math

import pytest
from lines import Bound, Line, Record, Verdict

NAN = math.nan


@pytest.mark.parametrize(
    ("bound", "measured", "predicted", "verdict"),
    [
        (Bound(kind="at most", value=0.1), 0.1, None, Verdict.OK),
        (Bound(kind="at most", value=0.1), 0.11, None, Verdict.MISSED),
        (Bound(kind="at most", value=0.1), NAN, None, Verdict.MISSED),
        (Bound(kind="at least", value=2), 1.9, None, Verdict.MISSED),
        (Bound(kind="at least", value=2), NAN, None, Verdict.MISSED),
        (Bound(kind="within", value=0.1), 109.0, 100.0, Verdict.OK),
        (Bound(kind="within", value=0.1), 89.0, 100.0, Verdict.MISSED),
        (Bound(kind="within", value=0.1), -109.0, -100.0, Verdict.OK),
        (Bound(kind="at least of predicted", value=0.75), 74.0, 100.0, Verdict.MISSED),
        (Bound(kind="equal"), 4.0, 4.0, Verdict.OK),
        (None, 4.0, None, Verdict.MEASURED),
        (Bound(kind="at most", value=1), None, None, Verdict.SKIPPED),
    ],
)
def test_a_bound_is_held(
    bound: Bound | None, measured: float | None, predicted: float | None, verdict: Verdict
) -> None:
    line = Line(name="x", measured=measured, predicted=predicted, unit="s", bound=bound)
    assert line.verdict(on_device=True) is verdict


def test_what_only_a_device_is_held_to_is_rehearsed_elsewhere() -> None:
    bound = Bound(kind="at least", value=1.0, anywhere=False)
    line = Line(name="x", measured=0.1, unit="GB/s", bound=bound)
    assert line.verdict(on_device=False) is Verdict.REHEARSED
    assert line.verdict(on_device=True) is Verdict.MISSED


def test_a_record_comes_back_from_its_line_and_holds_no_nan() -> None:
    line = Line(name="x", measured=NAN, unit="s", figures={"a": 1.0, "b": NAN})
    record = Record.of(line, check="c", seconds=1.234, on_device=True)
    assert record.measured is None and record.note == "NaN" and record.figures == {"a": 1.0}
    assert Record.from_json(record.to_json()) == record
