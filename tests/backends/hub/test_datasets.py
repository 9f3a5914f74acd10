"""A split of a data set of the hub becomes one file; by the real client against a hub on
loopback."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from milescli.backends.hub.datasets import fetch_data, join_files, missing_bytes
from milescli.console.output import Output
from milescli.core.errors import DataError
from milescli.recipe.data_files import parse_hub
from tests.loopback_hub import COMMIT, LoopbackHub, no_hub_for

TEST = "main/test-00000-of-00001.parquet"


def _fetch(spelling: str, into: Path, *, output: Output | None = None) -> Path:
    data = parse_hub(spelling, key="data.prompts")
    return fetch_data(data, key="prompts", into=into, output=output)


def _questions(file: Path) -> list[str]:
    return pq.read_table(file).column("question").to_pylist()


def test_a_split_is_fetched_said_first_and_taken_from_the_cache_without_the_hub(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = io.StringIO()
    output = Output(stdout=io.StringIO(), stderr=said)
    file = _fetch("hf:org/sums:main:test", tmp_path, output=output)
    assert _questions(file) == ["1*1?"]
    assert (
        f"downloading the data set `org/sums` (main, commit {COMMIT[:12]}) from the hub: "
        f"{len(hub.files['datasets/org/sums'][TEST])} B in 1 file" in said.getvalue()
    )
    assert sorted(hub.fetched) == ["README.md", TEST]

    hub.fetched.clear()
    assert _fetch("hf:org/sums:main:test", tmp_path) == file
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert _fetch("hf:org/sums:main:test", tmp_path) == file
    assert not hub.fetched
    with pytest.raises(DataError, match="cannot be downloaded from the hub") as caught:
        _fetch("hf:org/sums:main:train", tmp_path)
    assert "2 of 2 files are not in the cache" in caught.value.why
    assert any("hf download org/sums --repo-type dataset" in fix for fix in caught.value.fixes)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_the_parts_of_a_split_become_one_file(
    hub: LoopbackHub, tmp_path: Path, suffix: str
) -> None:
    if suffix == ".jsonl":
        hub.files["datasets/org/sums"] = {
            "train-0.jsonl": b'{"a": 1}',  # no line break at its end
            "train-1.jsonl": b'{"a": 2}\n',
            "train-2.jsonl": b"",
        }
        file = _fetch("hf:org/sums:train", tmp_path / "data")
        assert file.read_text() == '{"a": 1}\n{"a": 2}\n'
    else:
        file = _fetch("hf:org/sums:main:train", tmp_path / "data")
        assert _questions(file) == ["1+0?", "0+1?", "2-1?"]
    assert file == tmp_path / "data" / f"prompts{suffix}"


def test_content_that_is_not_what_the_hub_lists_is_refused(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    hub.lies.add(TEST)
    with pytest.raises(DataError, match="is corrupt") as caught:
        _fetch("hf:org/sums:main:test", tmp_path)
    assert "hash" in caught.value.why
    spoilt = Path(caught.value.fixes[0].removeprefix("rm ").partition(" #")[0].strip())
    assert spoilt.is_file()
    spoilt.unlink()
    hub.lies.clear()
    assert _fetch("hf:org/sums:main:test", tmp_path)


def test_without_the_hub_what_was_fetched_will_do_and_the_rest_is_refused_without_waiting(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _fetch("hf:org/sums:main:test", tmp_path)
    no_hub_for(monkeypatch)
    assert _fetch("hf:org/sums:main:test", tmp_path) == file
    with pytest.raises(DataError, match="cannot be downloaded from the hub"):
        _fetch("hf:org/other", tmp_path)


def test_what_the_hub_does_not_have_is_refused(hub: LoopbackHub, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither a file nor available on the hub"):
        _fetch("hf:org/none:train", tmp_path)


def test_how_much_is_still_to_be_fetched_is_known_before(hub: LoopbackHub, tmp_path: Path) -> None:
    data = parse_hub("hf:org/sums:main:test", key="data.prompts")
    assert missing_bytes(data, key="prompts") == len(hub.files["datasets/org/sums"][TEST])
    assert TEST not in hub.fetched
    _fetch("hf:org/sums:main:test", tmp_path)
    assert missing_bytes(data, key="prompts") == 0


def test_parts_of_a_split_become_one_file_whatever_their_format(tmp_path: Path) -> None:
    first, second = tmp_path / "a.csv", tmp_path / "b.csv"
    first.write_text("q,a\n1 + 1?,2\n")
    second.write_text('q,a\n"2, 2?",4\n')
    joined = join_files([first, second], tmp_path / "out" / "prompts.jsonl", key="prompts")
    rows = [json.loads(line) for line in joined.read_text().splitlines()]
    assert rows == [{"q": "1 + 1?", "a": "2"}, {"q": "2, 2?", "a": "4"}]


def test_lines_of_parts_stay_apart(tmp_path: Path) -> None:
    parts = []
    for number, text in enumerate(['{"n": 0}', "", '{"n": 2}\n{"n": 3}\n']):
        parts.append(tmp_path / f"{number}.jsonl")
        parts[-1].write_text(text)
    joined = join_files(parts, tmp_path / "out" / "prompts.jsonl", key="prompts")
    assert joined.read_text() == '{"n": 0}\n{"n": 2}\n{"n": 3}\n'
