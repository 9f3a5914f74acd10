"""Tests of several files as one, and of some rows of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from milescli.core.errors import DataError
from milescli.data import prompt_source
from milescli.data.file_prompts import FilePrompts
from milescli.data.file_rows import describe_row, group_by_file
from milescli.data.prompt_source import SourceReport, load_source
from milescli.data.tokenizer import ChatTokenizer
from milescli.recipe.data import Data

Load = Callable[..., tuple[FilePrompts, SourceReport]]


@pytest.fixture
def load(tokenizer: ChatTokenizer, tmp_path: Path) -> Load:
    def call(*names: str, **data: object) -> tuple[FilePrompts, SourceReport]:
        named = names[0] if len(names) == 1 else list(names)
        settings = Data(prompts=named, **data)  # type: ignore[arg-type]
        loaded = load_source(settings, "prompts", tokenizer=tokenizer, seed=0, base_dir=tmp_path)
        return loaded.source, loaded.report

    return call


def _rows(word: str, count: int) -> list[dict[str, object]]:
    return [{"prompt": f"{word} {n}?", "label": str(n)} for n in range(count)]


def _texts(loaded: FilePrompts) -> list[str]:
    return [prompt.text for prompt in loaded.prompts]


@pytest.mark.parametrize("most", [100, 4], ids=["small", "large"])
def test_several_files_are_read_as_one_and_each_row_knows_its_file(
    load: Load,
    jsonl: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    monkeypatch.setattr(prompt_source, "LARGE_ROWS", most)
    jsonl(*_rows("a", 3), name="a.jsonl")
    pq.write_table(pa.Table.from_pylist(_rows("b", 5)), tmp_path / "b.parquet")
    (tmp_path / "c.csv").write_text('question,answer\n"c, 0?",7\nc 1?,8\n')
    loaded, report = load("a.jsonl", "b.parquet[1:4]", "c.csv")
    assert loaded.is_large is (most == 4)
    assert _texts(loaded) == ["a 0?", "a 1?", "a 2?", "b 1?", "b 2?", "b 3?", "c, 0?", "c 1?"]
    assert report.num_rows == len(loaded) == 8
    named = [describe_row(prompt.index, loaded.files) for prompt in loaded.prompts]
    assert named[0] == f"row 1 of {tmp_path}/a.jsonl"
    assert named[3] == f"row 2 of {tmp_path}/b.parquet"
    assert named[6] == f"row 2 of {tmp_path}/c.csv", "its line"
    parts = group_by_file(loaded.prompts, loaded.files)
    assert [[prompt.index for prompt in own] for _, own in parts] == [[0, 1, 2], [1, 2, 3], [1, 2]]
    assert {prompt.text for _, prompt in loaded.take(8)} == {*_texts(loaded)}


@pytest.mark.parametrize(
    ("rows", "first", "last"), [("[0:4]", 0, 3), ("[4:]", 4, 9), ("[:1]", 0, 0), ("[8:99]", 8, 9)]
)
def test_a_slice_is_some_rows_with_their_own_index(
    load: Load, jsonl: Callable[..., Path], rows: str, first: int, last: int
) -> None:
    path = jsonl(*_rows("a", 10))
    loaded, report = load(f"{path}{rows}")
    assert [prompt.index for prompt in loaded.prompts] == [*range(first, last + 1)]
    assert report.path == f"{path}[{first}:{rows[1:-1].partition(':')[2]}]"
    assert report.sha256 != load(str(path))[1].sha256


def test_what_is_outside_of_a_slice_is_not_read(load: Load, jsonl: Callable[..., Path]) -> None:
    path = jsonl(*_rows("a", 2), b"{", *_rows("b", 2))
    assert _texts(load(f"{path}[0:2]")[0]) == ["a 0?", "a 1?"]
    with pytest.raises(DataError, match="line 3: not JSON"):
        load(f"{path}[1:4]")


def test_a_slice_behind_the_end_is_refused(load: Load, jsonl: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match="has no row 2"):
        load(f"{jsonl(*_rows('a', 2))}[2:]")


def test_a_file_whose_name_has_brackets_is_itself(load: Load, jsonl: Callable[..., Path]) -> None:
    jsonl(*_rows("a", 3), name="a.jsonl")
    odd = jsonl(*_rows("b", 1), name="a.jsonl[0:2]")
    odd.rename(odd.with_name("a[0:2].jsonl"))
    assert _texts(load("a[0:2].jsonl")[0]) == ["b 0?"]


def test_a_bad_row_of_one_of_several_files_names_that_file(
    load: Load, jsonl: Callable[..., Path]
) -> None:
    jsonl(*_rows("a", 2), name="a.jsonl")
    jsonl(*_rows("b", 1), b"[]", name="b.jsonl")
    with pytest.raises(DataError, match=r"1 of 2 rows of .*b\.jsonl cannot be used .*line 2"):
        load("a.jsonl", "b.jsonl")


def test_long_prompts_name_the_file_they_are_in(load: Load, jsonl: Callable[..., Path]) -> None:
    jsonl(*_rows("a", 2), name="a.jsonl")
    jsonl({"prompt": "7" * 200, "label": "1"}, name="b.jsonl")
    with pytest.raises(DataError, match=r"1 of 3 prompts of .*why: .*b\.jsonl: row 1: 2"):
        load("a.jsonl", "b.jsonl", max_prompt_tokens=100, long_prompts="error")
