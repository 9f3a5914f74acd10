"""Tests of values that columnar types change: rows come back as they were before they were written
to columns."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.data.columnar import without_nulls
from milescli.data.file_rows import read_file
from milescli.data.rows import DataRow, PromptRowParser
from milescli.data.tables import Table
from milescli.recipe.data_files import DataFile

NAMES = st.sampled_from(["city", "unit", "query", "a", "b"])
TYPES = st.sampled_from(["string", "integer", "number"])
PROPERTY = st.fixed_dictionaries(
    {"type": TYPES}, optional={"description": st.just("x"), "enum": st.just(["a", "b"])}
)
TOOL = st.builds(
    lambda name, properties: {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
            },
        },
    },
    NAMES,
    st.dictionaries(NAMES, PROPERTY, min_size=1, max_size=3),
)
CALL = st.builds(
    lambda name, arguments: {"function": {"name": name, "arguments": arguments}},
    NAMES,
    st.dictionaries(NAMES, st.sampled_from(["Rome", "C"]), min_size=1, max_size=3),
)
TURN = st.builds(
    lambda calls: {"role": "assistant", "content": "x", "tool_calls": calls},
    st.lists(CALL, min_size=1, max_size=2),
) | st.just({"role": "user", "content": "x"})
ROW = st.fixed_dictionaries(
    {
        "prompt": st.lists(TURN, max_size=3).map(
            lambda turns: [*turns, {"role": "user", "content": "hi"}]
        )
    },
    optional={"tools": st.lists(TOOL, min_size=1, max_size=3)},
)


def _read(path: Path, **keys: Any) -> list[DataRow]:
    form = PromptRowParser(**{"field": "prompts", "needs_label": False, **keys})
    rows = read_file(Table(path), DataFile(name=str(path)), form, folder=path.parent)
    rows.require_good()
    return rows.read(range(len(rows)))


def _write(table: pa.Table, path: Path) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    else:  # the text that other programs write of columns
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return path


@given(rows=st.lists(ROW, min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_rows_come_back_without_what_a_columnar_type_added(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    filled = [{"tools": None, **row} for row in rows]  # pyarrow takes the columns of the first row
    for name in ("a.parquet", "a.arrow"):
        read = _read(_write(pa.Table.from_pylist(filled), folder / name))
        assert [row.messages for row in read] == [row["prompt"] for row in rows]
        assert [row.tools for row in read] == [row.get("tools", []) for row in rows]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".jsonl"])
@pytest.mark.parametrize("empty", [None, {"type": None}])
def test_an_argument_of_another_rows_tool_reaches_no_prompt(
    tmp_path: Path, suffix: str, empty: object
) -> None:
    def row(**properties: object) -> dict[str, Any]:
        call = {"function": {"name": "f", "arguments": dict.fromkeys(properties, "x")}}
        parameters = {"type": "object", "properties": properties}
        return {
            "prompt": [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "user", "content": "hi"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        }

    rows = [row(city={"type": "string"}), row(a={"type": "integer"}, b={"type": "integer"})]
    filled = json.loads(json.dumps(rows))
    filled[0]["tools"][0]["function"]["parameters"]["properties"]["a"] = empty
    read = _read(_write(pa.Table.from_pylist(filled), tmp_path / f"a{suffix}"))
    for got, meant in zip(read, rows, strict=True):
        assert got.tools == meant["tools"]
        assert got.messages == meant["prompt"]


def test_nulls_that_json_states_stay(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "default": None}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": None}}}],
    }
    user = {"role": "user", "content": "hi"}
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": [turn, user], "tools": tools}))
    (row,) = _read(tmp_path / "a.jsonl")
    assert (row.messages, row.tools) == ([turn, user], tools)
    assert without_nulls({"a": [None, {"b": None}]}) == {"a": [None, {}]}


def test_json_in_columns_is_decoded_at_any_depth(tmp_path: Path) -> None:
    turn = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    properties = {"a": {"type": ["string", "null"], "default": None}}

    def as_json(value: object) -> pa.Array:
        return pa.ExtensionArray.from_storage(pa.json_(), pa.array([json.dumps(value)]))

    parameters = pa.StructArray.from_arrays([as_json(properties)], ["properties"])
    tool = pa.StructArray.from_arrays([pa.array(["f"]), parameters], ["name", "parameters"])
    table = pa.table(
        {
            "prompt": pa.ListArray.from_arrays([0, 1], as_json(turn)),
            "tools": pa.ListArray.from_arrays([0, 1], tool),
        }
    )
    for name in ("a.parquet", "a.arrow"):
        (row,) = _read(_write(table, tmp_path / name))
        assert row.text == "hi"
        assert row.tools[0]["function"]["parameters"]["properties"] == properties


@pytest.mark.parametrize(
    ("values", "kind", "labels"),
    [
        ([0.1, 3.0, 1e-7, 16777216.0], pa.float32(), ["0.1", "3", "1e-07", "16777216"]),
        ([0.1], pa.float16(), ["0.1"]),
        ([0.1], pa.float64(), ["0.1"]),
        ([[0.1]], pa.list_(pa.float32()), ["0.1"]),
        ([Decimal("1.50"), Decimal("400.00")], pa.decimal128(5, 2), ["1.5", "400"]),
        ([Decimal("1" * 38), Decimal("-2000")], pa.decimal128(38, 0), ["1" * 38, "-2000"]),
        ([7], pa.uint8(), ["7"]),
        (["x"], pa.large_string(), ["x"]),
    ],
)
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_label_keeps_its_shortest_text(
    tmp_path: Path, suffix: str, values: list[Any], kind: pa.DataType, labels: list[str]
) -> None:
    inner = pa.array(
        [{"ground_truth": value} for value in values], pa.struct({"ground_truth": kind})
    )
    columns = {"prompt": ["a"] * len(values), "label": pa.array(values, kind), "inner": inner}
    path = _write(pa.table(columns), tmp_path / f"a{suffix}")
    assert [row.label for row in _read(path)] == labels
    assert [row.label for row in _read(path, label_key="inner.ground_truth")] == labels


def test_dictionaries_and_maps_are_plain_values(tmp_path: Path) -> None:
    table = pa.table(
        {
            "prompt": pa.array(["a", "b"]).dictionary_encode(),
            "label": pa.array(
                [[("answer", 0.5)], [("answer", 1.0)]], pa.map_(pa.string(), pa.float32())
            ),
        }
    )
    read = _read(_write(table, tmp_path / "a.parquet"), label_key="label.answer")
    assert [(row.text, row.label) for row in read] == [("a", "0.5"), ("b", "1")]
