"""Tests of rows in Arrow: they come back exactly, in any order, from files of any format."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.core.errors import DataError
from milescli.data import file_rows
from milescli.data.file_rows import FileRows, read_file
from milescli.data.rows import PromptRowParser
from milescli.data.tables import Table
from milescli.recipe.data_files import DataFile

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(str.strip)
INTEGERS = st.integers(-(2**63), 2**64 - 1)
VALUES = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def _read(path: Path) -> FileRows:
    form = PromptRowParser(field="prompts", needs_label=False)
    return read_file(Table(path), DataFile(name=str(path)), form, folder=path.parent)


@given(schemas=st.lists(st.dictionaries(TEXT, VALUES, max_size=3), min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_values_of_json_come_back_exactly_and_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, schemas: list[dict[str, object]]
) -> None:
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    rows = [{"prompt": f"{n}?", "tools": [schema]} for n, schema in enumerate(schemas)]
    path.write_text("\n".join(map(json.dumps, rows)))
    backwards = range(len(rows) - 1, -1, -1)
    read = _read(path).read(backwards)
    assert [row.index for row in read] == list(backwards)
    assert repr([row.tools for row in read]) == repr([rows[place]["tools"] for place in backwards])


def test_values_that_json_lacks_come_back_from_parquet_and_nulls_of_its_types_do_not(
    tmp_path: Path,
) -> None:
    turn = {"role": "user", "content": "hi", "at": datetime(2026, 1, 2, tzinfo=UTC), "raw": b"\0"}
    rows = [{"prompt": [turn], "tools": [{"a": 1, "b": None}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (row,) = _read(tmp_path / "a.parquet").read([0])
    assert (row.messages, row.tools) == (rows[0]["prompt"], [{"a": 1}])


@pytest.mark.parametrize(("rows", "num_bytes"), [(3, 2**20), (1000, 500)])
def test_many_batches_are_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, num_bytes: int
) -> None:
    monkeypatch.setattr(file_rows, "BATCH_ROWS", rows)
    monkeypatch.setattr(file_rows, "BATCH_BYTES", num_bytes)
    path = tmp_path / "a.csv"
    path.write_text("prompt,label\n" + "".join(f"{n}?,{n % 4}\n" for n in range(20)))
    read = _read(path)
    assert [row.text for row in read.read([19, 0, 7])] == ["19?", "0?", "7?"]
    assert [row.label for row in read.distinct_labels(10)[0]] == ["0", "1", "2", "3"]
    assert len(set(read.rows.hashes("key").tolist())) == 20
    assert {item.name for item in tmp_path.iterdir()} == {"a.csv"}, "the copy has no name"


def test_a_full_disk_is_an_error_that_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}')
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(file_rows.tempfile, "TemporaryFile", lambda dir: full)
        with pytest.raises(DataError, match="but that disk is full") as error:
            _read(path)
    assert error.value.fixes[0].startswith(f"df -h {tmp_path}")


@pytest.mark.parametrize("depth", [100, 600, 990, 3000])
def test_tools_that_are_nested_too_deeply_are_a_bad_row(tmp_path: Path, depth: int) -> None:
    schema = '{"a": ' * depth + "1" + "}" * depth
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "hi", "tools": [{schema}]}}')
    rows = _read(tmp_path / "a.jsonl")
    reasons = [] if depth == 100 else ["JSON nested too deeply"]
    assert [bad.reason for bad in rows.bad] == reasons
