"""Tests of files too large to be tokenised at the start: the same prompts, made when they come up.
The bound is lowered, so that small files count as large."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from milescli.core.errors import DataError
from milescli.core.types import Prompt
from milescli.data import prompt_source
from milescli.data.file_prompts import LARGE_ORDER, FilePrompts, epoch_order
from milescli.data.held_out_leaks import exact_leaks
from milescli.data.prompt_source import SourceReport, load_source
from milescli.data.tokenizer import ChatTokenizer
from milescli.recipe.data import Data
from milescli.rollout.rewards.label_check import check_labels

NUM_ROWS = 40
ROWS = [{"prompt": f"{row} + {row}?", "label": str(row % 7)} for row in range(NUM_ROWS)]

Load = Callable[..., tuple[FilePrompts, SourceReport]]


@pytest.fixture
def load(tokenizer: ChatTokenizer, tmp_path: Path) -> Load:
    def call(path: str | Path, **data: object) -> tuple[FilePrompts, SourceReport]:
        settings = Data(prompts=str(path), **data)  # type: ignore[arg-type]
        loaded = load_source(settings, "prompts", tokenizer=tokenizer, seed=0, base_dir=tmp_path)
        return loaded.source, loaded.report

    return call


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(prompt_source, "LARGE_ROWS", NUM_ROWS // 4)
    yield


def _written(folder: Path, suffix: str) -> Path:
    path, table = folder / f"data{suffix}", pa.Table.from_pylist(ROWS)
    if suffix == ".parquet":
        pq.write_table(table, path, row_group_size=7)
    elif suffix == ".arrow":
        feather.write_feather(table, path)
    elif suffix == ".csv":
        lines = [f'"{row["prompt"]}",{row["label"]}' for row in ROWS]
        path.write_text("\n".join(["prompt,label", *lines]))
    else:
        path.write_text("\n".join(json.dumps(row) for row in ROWS))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet", ".arrow"])
def test_a_large_file_has_the_prompts_that_a_small_one_has(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    path = _written(tmp_path, suffix)
    small, told = load(path)
    monkeypatch.setattr(prompt_source, "LARGE_ROWS", 3)
    mapped, told_large = load(path)
    assert mapped.is_large and not small.is_large
    assert list(mapped.prompts) == small.prompts == mapped.first()
    assert mapped.prompts[3:9] == small.prompts[3:9]
    assert mapped.take(100) == small.take(100)
    assert told_large == told


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet", ".arrow"])
def test_some_rows_of_a_large_file_are_those_rows(
    load: Load, tmp_path: Path, large: None, suffix: str
) -> None:
    mapped = load(f"{_written(tmp_path, suffix)}[3:23]")[0]
    assert mapped.is_large
    assert [prompt.text for prompt in mapped.prompts] == [row["prompt"] for row in ROWS[3:23]]


def test_a_large_file_is_resumed_where_it_stood(load: Load, tmp_path: Path, large: None) -> None:
    path = _written(tmp_path, ".jsonl")
    straight, resumed = load(path)[0], load(path)[0]
    straight.take(55)
    resumed.seek(straight.position)
    assert resumed.take(50) == straight.take(50)


def test_long_prompts_of_a_large_file_are_passed_over_and_counted(
    load: Load, jsonl: Callable[..., Path], large: None
) -> None:
    rows = [{"prompt": "7" * (200 if row % 4 == 0 else 1), "label": "1"} for row in range(NUM_ROWS)]
    path = jsonl(*rows)
    mapped, report = load(path, max_prompt_tokens=100)
    assert (report.num_rows, report.num_dropped) == (NUM_ROWS, NUM_ROWS // 4)
    taken = [mapped.take(5) for _ in range(6)]
    seen = Counter(prompt.index for part in taken for _, prompt in part)
    assert set(seen) == {row for row in range(NUM_ROWS) if row % 4} and set(seen.values()) == {1}
    resumed = load(path, max_prompt_tokens=100)[0]
    resumed.take(10)
    again = load(path, max_prompt_tokens=100)[0]
    again.seek(resumed.position)
    assert again.take(5) == taken[2]
    assert mapped.num_skipped == mapped.position - 30 > 0
    assert len(mapped.first(3)) == 3 and mapped.first(3)[0].index == 1


def test_long_prompts_of_a_large_file_refuse_where_the_recipe_says_so(
    load: Load, jsonl: Callable[..., Path], large: None
) -> None:
    rows = [{"prompt": "7" * (200 if row == 30 else 1), "label": "1"} for row in range(NUM_ROWS)]
    with pytest.raises(DataError, match="row 31: 2"):
        load(jsonl(*rows), max_prompt_tokens=100, long_prompts="error")


def test_a_large_file_that_changes_in_the_middle_of_a_run_is_refused(
    load: Load, tmp_path: Path, large: None
) -> None:
    path = _written(tmp_path, ".jsonl")
    mapped = load(path)[0]
    mapped.take(3)
    path.write_text(path.read_text().replace("+", "-") + "\n{}")
    with pytest.raises(DataError, match="changed while miles read it"):
        mapped.take(3)


def test_labels_of_a_large_file_are_sampled_and_the_sample_is_told(
    load: Load, tmp_path: Path, large: None
) -> None:
    mapped = load(_written(tmp_path, ".jsonl"))[0]
    rows, num_labels = mapped.files[0].distinct_labels(100)
    assert ([row.index for row in rows], num_labels) == ([*range(7)], 7)
    rows, num_labels = mapped.files[0].distinct_labels(3)
    assert ([row.label for row in rows], num_labels) == (["0", "2", "4"], 7)

    class Reward:
        def check_label(self, label: str | None) -> str | None:
            return None if label != "4" else "no four"

    said: list[str] = []
    with pytest.raises(DataError, match="line 5: the label '4': no four"):
        check_labels(
            Reward(),  # type: ignore[arg-type]
            rows,
            name="mine",
            path=mapped.files[0].path,
            say=said.append,
            num_labels=num_labels,
        )
    assert len(said) == 1 and "7 different labels; 3 of them" in said[0]


def test_a_held_out_prompt_in_a_large_file_is_found_with_both_rows(
    load: Load, jsonl: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heldout = load(jsonl({"prompt": "new", "label": "1"}, ROWS[30], name="test.jsonl"))[0]
    small = load(_written(tmp_path, ".jsonl"))[0]
    monkeypatch.setattr(prompt_source, "LARGE_ROWS", 3)
    mapped = load(_written(tmp_path, ".jsonl"))[0]
    for prompts in (small, mapped):
        (leak,) = exact_leaks(heldout, prompts, num_heldout=None)
        assert (leak.heldout, leak.prompts) == (1, 30)
        assert exact_leaks(heldout, prompts, num_heldout=1) == []


def _split_mix(state: int) -> int:
    """The output function of SplitMix64, in whole numbers without bound."""
    mask = 2**64 - 1
    state &= mask
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
    return state ^ state >> 31


def test_the_order_of_many_rows_is_a_permutation_that_never_changes() -> None:
    num_rows = LARGE_ORDER + 1
    first = epoch_order(num_rows, seed=0, epoch=0, shuffle=True)
    assert sorted(first) == list(range(num_rows))
    start = int.from_bytes(hashlib.blake2b(b"0/0", digest_size=8).digest(), "little")
    ranks = [_split_mix(start + row * 0x9E3779B97F4A7C15) for row in range(1, num_rows + 1)]
    assert list(first) == sorted(range(num_rows), key=ranks.__getitem__)
    assert epoch_order(num_rows, seed=0, epoch=1, shuffle=True) != first
    assert epoch_order(num_rows, seed=1, epoch=0, shuffle=True) != first


def test_a_position_beyond_one_epoch_of_nothing_but_long_prompts_is_refused() -> None:
    prompts = [Prompt(index=n, token_ids=[0] * 9, text="?") for n in range(4)]
    with pytest.raises(DataError, match="every prompt is longer than 5 tokens"):
        FilePrompts(prompts, seed=0, shuffle=True, max_tokens=5).take(2)
