"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from milescli.core.units import (
    decimal_product,
    format_bytes,
    format_count,
    format_duration,
    format_time,
    parse_size,
    parse_time,
)


@pytest.mark.parametrize(
    ("number", "factor", "product"),
    [(50, 1.1, 55), (50, 0.58, 29), (192, 200 / 192, 200), (10**9 + 1, 1.0, 10**9 + 1)],
)
def test_a_product_is_that_of_the_decimals(number: int, factor: float, product: int) -> None:
    assert decimal_product(number, factor) == product
    assert decimal_product(5, 0.5) == 2.5


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1024**3, "1.0 GiB"),
        (-2048, "-2.0 KiB"),
        (5 * 1024**5, "5.0 PiB"),
        (3 * 1024**6, "3072.0 PiB"),
    ],
)
def test_bytes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (1000, "1.0k"), (1_234_000, "1.2M"), (3e9, "3.0B"), (2e12, "2.0T")],
)
def test_counts(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (4.2, "4.2 s"),
        (59.94, "59.9 s"),
        (75, "1 m 15 s"),
        (3599.6, "1 h 00 m"),
        (7320, "2 h 02 m"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@example(59.97)
@given(st.floats(min_value=0, max_value=1e7))
def test_no_duration_says_sixty(seconds: float) -> None:
    text = format_duration(seconds)
    assert "60 s" not in text and "60.0 s" not in text and "60 m" not in text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5kb", 1500),
        (" 7 ", 7),
        ("2 TiB", 2 * 1024**4),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "0", "5XB", "five", "1e999GB", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


def test_a_time_is_read_as_it_is_written() -> None:
    assert format_time(1_764_108_001.234) == "2025-11-25T22:00:01.234Z"
    assert parse_time("2025-11-25T22:00:01.234Z") == 1_764_108_001.234
    assert math.isnan(parse_time(None))
