"""Tests of how data files are named in a recipe and on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.data_files import DataFile, parse_data_file
from milescli.recipe.load import LoadedRecipe, load
from milescli.recipe.resolved import load_resolved, resolved_yaml


def _load(folder: Path, data: str, *sets: str) -> LoadedRecipe:
    (folder / "my.yaml").write_text(f"model: {{scratch: {{}}}}\ndata:\n  {data}\n")
    return load("my.yaml", sets=sets, environ={}, cwd=folder, home=folder)


@pytest.mark.parametrize(
    ("data", "sets", "prompts"),
    [
        ("prompts: a.jsonl", [], "a.jsonl"),
        ("prompts: 007", [], "007"),
        ("prompts: a.jsonl[0:10]", [], "a.jsonl[0:10]"),
        ("prompts: [a.jsonl, b.parquet]", [], ["a.jsonl", "b.parquet"]),
        ('prompts: ["a.jsonl[0:10]", 7]', [], ["a.jsonl[0:10]", "7"]),
        ("prompts: x", ["data.prompts=a.jsonl[0:10]"], "a.jsonl[0:10]"),
        ("prompts: x", ["data.prompts=[a.jsonl, b.jsonl]"], ["a.jsonl", "b.jsonl"]),
    ],
)
def test_one_name_or_several_in_a_file_and_on_the_command_line(
    tmp_path: Path, data: str, sets: list[str], prompts: object
) -> None:
    loaded = _load(tmp_path, data, *sets)
    assert loaded.recipe.data.prompts == prompts
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(loaded))
    assert load_resolved(tmp_path / "resolved.yaml").recipe == loaded.recipe


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("a.jsonl[5:2]", r"without STOP"),
        ("a.jsonl[-1:]", "counted from 0"),
        ("a.jsonl[1]", r"\[START:STOP\]"),
        ("a.jsonl[0:10:2]", r"\[START:STOP\]"),
        ("[a.jsonl, '']", "contains an empty name"),
        ("[a.jsonl, 'hf:']", "hf:NAME"),
        ("[a.jsonl, 'task:']", "must be followed by a name"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_a_file_is_opened(
    tmp_path: Path, value: str, says: str
) -> None:
    with pytest.raises(RecipeError, match=says):
        _load(tmp_path, "prompts: x", f"data.prompts={value}")


def test_rows_are_spelled_as_they_are_read() -> None:
    for text in ("a.jsonl", "a.jsonl[0:10]", "hf:org/x:main:train[5:]", "task:sums[2:3]"):
        assert parse_data_file(text, key="data.prompts").spelled() == text
    assert parse_data_file("a[0]b.jsonl[:3]", key="k") == DataFile(name="a[0]b.jsonl", stop=3)
