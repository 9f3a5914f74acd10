"""Tests of data files as tables: records in order, single rows again, files that are refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.core.errors import DataError
from milescli.data import tables
from milescli.data.prompt_source import ProgressReporter
from milescli.data.tables import Record, Table, parse_line

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def _records(path: Path, content: bytes) -> list[Record]:
    path.write_bytes(content)
    return list(Table(path).records())


@given(rows=st.lists(st.dictionaries(TEXT, TEXT | st.integers() | st.none(), max_size=3)))
@settings(max_examples=50, deadline=None)
def test_lines_are_read_as_python_reads_them(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]]
) -> None:
    path = tmp_path_factory.mktemp("tables") / "a.jsonl"
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\r\n" for row in rows))
    table = Table(path)
    assert list(table.records()) == [(place + 1, row) for place, row in enumerate(rows)]
    assert table.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("chunk_bytes", [1, 2, 7, 64, 1000])
def test_where_chunks_end_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    lines = [b'{"a": "%d"}' % (10**n) for n in range(12)]
    content = b"\n\n".join([b"\n".join(lines), lines[0]]) + b"\n\n"
    whole = _records(tmp_path / "a.jsonl", content)
    monkeypatch.setattr(tables, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(tables, "MAX_LINE_BYTES", 18)
    table = Table(tmp_path / "a.jsonl")
    records = list(table.records())
    assert [n for n, _ in records] == [n for n, _ in whole] == list(range(1, 15))
    assert records[12] == (13, "an empty line")
    long = {n for n, row in records if row == tables.TOO_LONG}
    assert long == {n for n in range(1, 13) if len(lines[n - 1]) > 18}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_csv_fields_may_hold_commas_quotes_and_line_breaks(tmp_path: Path, mark: bytes) -> None:
    content = mark + b'prompt,label\r\n"a, ""b""\nand c",1\r\n\r\nd\xe2\x80\xa8e,2\r\n'
    path = tmp_path / "a.csv"
    records = _records(path, content)
    expected = [
        (2, {"prompt": 'a, "b"\nand c', "label": "1"}),
        (5, {"prompt": "d\u2028e", "label": "2"}),
    ]
    assert records == expected
    table = Table(path)
    assert list(table.records()) == expected
    assert table.sha256 == hashlib.sha256(content).hexdigest()


def test_whole_numbers_keep_all_their_digits(tmp_path: Path) -> None:
    ((_, row),) = _records(tmp_path / "a.jsonl", b'{"a": 123456789012345678901234567890}')
    assert row == {"a": 123456789012345678901234567890}


@pytest.mark.parametrize("number", [2**90 + 1, -(2**63) - 1, 10**19])
def test_numbers_within_lists_and_objects_keep_them_too(number: int) -> None:
    row = {"label": [number], "turns": [{"arguments": {"id": number}}], "id": 2**63 - 1}
    assert parse_line(json.dumps(row).encode()) == row


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n' * 3)
    records = Table(path).records()
    next(records)
    with path.open("a") as file:
        file.write('{"a": 2}\n')
    with pytest.raises(DataError, match="changed while miles read it"):
        list(records)


@pytest.mark.parametrize(
    ("after_s", "calls", "said"),
    [(0.0, [5, 6], ["reading x: 5 rows"]), (60.0, [5, 6], [])],
)
def test_progress_is_told_where_it_takes_long(
    after_s: float, calls: Iterable[int], said: list[str]
) -> None:
    lines: list[str] = []
    tick = ProgressReporter(lines.append, "reading x", after_s=after_s)
    for count in calls:
        tick(count)
    assert lines == said


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize(
    ("header", "row"),
    [
        (b"prompt;label", b"a, b;null"),
        (b'"prompt";"label"', b'"a, b";"null"'),
        (b"prompt\tlabel", b"a, b\tnull"),
        (b"prompt|label", b"a, b|null"),
        (b'"prompt","label"', b'"a, b",null'),
        (b"\nprompt;label", b"a, b;null"),
    ],
)
def test_csv_fields_are_parted_as_the_header_is(
    tmp_path: Path, mark: bytes, header: bytes, row: bytes
) -> None:
    line = header.count(b"\n") + 2
    content = mark + header + b"\r\n" + row + b"\r\n"
    assert _records(tmp_path / "a.csv", content) == [(line, {"prompt": "a, b", "label": "null"})]
