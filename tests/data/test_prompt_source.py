"""Tests of order, position, lengths and files of the prompt source; rows are tested in
test_rows.py."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milescli.core.errors import DataError
from milescli.core.types import Prompt
from milescli.data.file_prompts import FilePrompts, epoch_order
from milescli.data.prompt_source import SourceReport, load_source
from milescli.data.tokenizer import ChatTokenizer
from milescli.recipe.data import Data

Load = Callable[..., tuple[FilePrompts, SourceReport]]

ORDER_OF_SEED_0 = [7, 3, 5, 2, 4, 1, 0, 6]


@pytest.fixture
def load(tokenizer: ChatTokenizer, tmp_path: Path) -> Load:
    def call(path: str | Path, **data: object) -> tuple[FilePrompts, SourceReport]:
        settings = Data(prompts=str(path), **data)  # type: ignore[arg-type]
        loaded = load_source(settings, "prompts", tokenizer=tokenizer, seed=0, base_dir=tmp_path)
        return loaded.source, loaded.report

    return call


def _source(num_prompts: int, *, seed: int = 0, shuffle: bool = True) -> FilePrompts:
    prompts = [
        Prompt(index=index, token_ids=[index], text=str(index)) for index in range(num_prompts)
    ]
    return FilePrompts(prompts, seed=seed, shuffle=shuffle)


@given(st.integers(1, 20), st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_every_epoch_holds_each_prompt_once_whatever_the_step_size(
    num_prompts: int, counts: list[int]
) -> None:
    source = _source(num_prompts)
    taken = [pair for count in counts for pair in source.take(count)]
    for epoch in range(len(taken) // num_prompts):
        part = taken[epoch * num_prompts : (epoch + 1) * num_prompts]
        assert {epoch_of_row for epoch_of_row, _ in part} == {epoch}
        assert sorted(prompt.index for _, prompt in part) == list(range(num_prompts))


@given(st.integers(1, 20), st.integers(0, 60), st.integers(1, 30))
def test_seek_continues_as_if_nothing_had_happened(
    num_prompts: int, position: int, count: int
) -> None:
    straight, resumed = _source(num_prompts), _source(num_prompts)
    straight.take(position)
    resumed.seek(position)
    assert resumed.take(count) == straight.take(count)
    assert resumed.position == straight.position == position + count


def test_the_order_is_the_same_on_every_machine() -> None:
    assert list(epoch_order(8, seed=0, epoch=0, shuffle=True)) == ORDER_OF_SEED_0
    assert list(epoch_order(8, seed=0, epoch=1, shuffle=True)) != ORDER_OF_SEED_0
    assert list(epoch_order(8, seed=1, epoch=0, shuffle=True)) != ORDER_OF_SEED_0


def test_without_shuffle_each_epoch_is_in_file_order() -> None:
    assert [prompt.index for _, prompt in _source(3, shuffle=False).take(6)] == [0, 1, 2, 0, 1, 2]


def test_long_prompts_are_dropped_and_counted(load: Load, jsonl: Callable[..., Path]) -> None:
    path = jsonl(
        {"prompt": "a", "label": "1"},
        {"prompt": "7" * 200, "label": "1"},
        {"prompt": "b", "label": "1"},
    )
    source, report = load(path, max_prompt_tokens=100)
    assert (len(source), report.num_rows, report.num_dropped) == (2, 3, 1)
    assert [prompt.index for prompt in source.prompts] == [0, 2]
    assert report.prompt_tokens_max > 200 > report.prompt_tokens_p50


def test_long_prompts_refuse_the_run_where_the_recipe_says_so(
    load: Load, jsonl: Callable[..., Path]
) -> None:
    path = jsonl({"prompt": "a", "label": "1"}, {"prompt": "7" * 200, "label": "1"})
    with pytest.raises(DataError, match=r"1 of 2 prompts .* row 2"):
        load(path, max_prompt_tokens=100, long_prompts="error")


def test_a_file_of_nothing_but_long_prompts_is_refused(
    load: Load, jsonl: Callable[..., Path]
) -> None:
    with pytest.raises(DataError, match="longer than 10 tokens"):
        load(jsonl({"prompt": "7" * 200, "label": "1"}), max_prompt_tokens=10)


def test_a_missing_file_is_answered_with_the_nearest_name(
    load: Load, jsonl: Callable[..., Path]
) -> None:
    path = jsonl({"prompt": "a", "label": "1"}, name="train.jsonl")
    with pytest.raises(DataError) as error:
        load("trian.jsonl")
    assert error.value.fixes == [f"--set data.prompts={path}"]


def test_files_of_another_kind_are_refused_with_the_command_that_mends_them(
    load: Load, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "lines.json").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    (tmp_path / "UP.CSV").write_text("prompt,label\n")
    (tmp_path / "my rows").write_text("{}")
    (tmp_path / "b.jsonl").write_bytes(b"PAR1....")
    (tmp_path / "c.parquet").write_bytes(b"no parquet")
    for name, fix in {
        "a.jsonl.gz": "gunzip -k",
        "a.json": f"jq -c '.[]' {tmp_path}/a.json > {tmp_path}/a.jsonl",
        "lines.json": f"jq -c . {tmp_path}/lines.json > {tmp_path}/lines.jsonl",
        "UP.CSV": f"mv {tmp_path}/UP.CSV {tmp_path}/UP.csv",
        "my rows": f"mv '{tmp_path}/my rows' '{tmp_path}/my rows.jsonl'",
        "no rows.jsonl": f"ls {tmp_path}",
        "b.jsonl": "mv ",
        "c.parquet": "head -c",
        ".": "--set data.prompts=",
    }.items():
        with pytest.raises(DataError) as error:
            load(name)
        assert error.value.fixes[0].startswith(fix), name


def test_an_empty_file_is_refused(load: Load, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="is empty"):
        load("empty.jsonl")


def test_parquet_and_jsonl_give_the_same_prompts(
    load: Load, jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    rows = [{"question": f"{n} + 1?", "answer": n + 1} for n in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    assert load("data.parquet")[0].prompts == load(jsonl(*rows))[0].prompts


def test_a_task_is_written_below_the_base_folder_and_read(load: Load, tmp_path: Path) -> None:
    source, report = load("task:sums-heldout")
    assert report.path == str(tmp_path / "tasks" / "sums-heldout.jsonl")
    assert report.num_demonstrations == len(source) == 256


def test_the_system_prompt_goes_before_the_user_and_not_into_the_text(
    load: Load, jsonl: Callable[..., Path], tokenizer: ChatTokenizer
) -> None:
    source, _ = load(jsonl({"prompt": "2 + 2?", "label": "4"}), system_prompt="Be brief.")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    assert source.prompts[0].token_ids == tokenizer.encode_chats([chat])[0]
    assert source.prompts[0].text == "2 + 2?"


def test_a_chat_template_that_refuses_names_the_row(
    load: Load,
    jsonl: Callable[..., Path],
    tokenizer: ChatTokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strict = "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}x"
    monkeypatch.setattr(tokenizer, "template", strict)
    path = jsonl(
        {"prompt": "a", "label": "1"}, {"prompt": [{"role": "tool", "content": "x"}], "label": "1"}
    )
    with pytest.raises(DataError, match=r"row 2 .*no tools"):
        load(path)
