"""Lines of files, by number, without reading the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.web import files
from milescli.web.files import LineIndex, LineIndexes

LINES = st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=40)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that lines lie across them."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 16)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be written by each example."""
    return tmp_path_factory.mktemp("lines") / "some.log"


def lines_of(data: bytes) -> list[bytes]:
    """What they are."""
    *whole, rest = data.split(b"\n")
    return [*whole, rest] if rest else whole


@settings(max_examples=60)
@given(lines=LINES, ends=st.booleans(), first=st.integers(0, 45), limit=st.integers(0, 45))
def test_any_lines_are_those_of_the_file(
    file: Path, lines: list[bytes], ends: bool, first: int, limit: int
) -> None:
    data = b"\n".join(lines) + (b"\n" if ends else b"")
    file.write_bytes(data)
    index = LineIndex(file)
    index.count()
    expected = lines_of(data)
    assert index.num_lines == len(expected) and index.is_whole
    assert index.lines(first, limit) == expected[first : first + limit]


@settings(max_examples=40)
@given(parts=st.lists(st.binary(max_size=40), min_size=1, max_size=6))
def test_a_file_that_grows_is_counted_on(file: Path, parts: list[bytes]) -> None:
    file.write_bytes(b"")
    index, data = LineIndex(file), b""
    for part in parts:
        data += part
        with file.open("ab") as opened:
            opened.write(part)
        index.count()
        assert index.num_lines == data.count(b"\n") + (not data.endswith(b"\n") and data != b"")
    assert index.lines(0, 100) == lines_of(data)


def test_a_file_that_was_replaced_is_counted_anew(tmp_path: Path) -> None:
    file = tmp_path / "some.log"
    file.write_bytes(b"a\nb\nc\n")
    index = LineIndex(file)
    index.count()
    file.write_bytes(b"d\n")
    index.count()
    assert index.lines(0, 9) == [b"d"]


def test_a_line_that_never_ends_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LONGEST_BYTES", 64)
    file = tmp_path / "some.log"
    file.write_bytes(b"x" * 1000 + b"\nnext\n")
    index = LineIndex(file)
    index.count()
    first, second = index.lines(0, 2)
    assert 64 <= len(first) <= 96 and second == b"next"


def test_counting_ends_for_time_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "some.log"
    file.write_bytes(b"line\n" * 100)
    index = LineIndex(file)
    with monkeypatch.context() as hurried:
        hurried.setattr(files, "COUNT_S", 0.0)
        index.count()
    assert not index.is_whole and index.num_lines < 100
    index.count()
    assert index.is_whole and index.num_lines == 100


def test_the_oldest_counts_are_forgotten(tmp_path: Path) -> None:
    indexes = LineIndexes()
    first = indexes.of(tmp_path / "0")
    for number in range(files.MAX_CACHED):
        indexes.of(tmp_path / str(number))
    assert indexes.of(tmp_path / "0") is first
    for number in range(files.MAX_CACHED + 1):
        indexes.of(tmp_path / f"other-{number}")
    assert indexes.of(tmp_path / "0") is not first
