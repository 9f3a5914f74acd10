"""What is on the hub is fetched, told, checked and kept; by the real client against a hub on
loopback."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from milescli.checkpoint.run_dir import RunDir
from milescli.console.output import Mode, Output
from milescli.core.errors import CheckpointError, DataError, ExitCode, MachineError
from milescli.recipe.hub_name import parse_hub
from milescli.recipe.schema import Data, Recipe
from milescli.runtime import hub as hub_module
from milescli.runtime.hub import fetch_config, fetch_data, fetch_model
from milescli.runtime.inputs import _absolute, facts_of_recipe, prepare
from tests.loopback_hub import COMMIT, LoopbackHub, loopback_hub

CARD = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# Sums
"""


def _parquet(*questions: str) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(
        pa.table({"question": list(questions), "answer": ["#### 1"] * len(questions)}), buffer
    )
    return buffer.getvalue()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with loopback_hub() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            served.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        served.files["datasets/org/sums"] = {
            "README.md": CARD,
            "main/train-00000-of-00002.parquet": _parquet("1+0?", "0+1?"),
            "main/train-00001-of-00002.parquet": _parquet("2-1?"),
            "main/test-00000-of-00001.parquet": _parquet("1*1?"),
            "socratic/train-00000-of-00001.parquet": _parquet("why?"),
            "load.py": b"raise SystemExit('remote code')",
        }
        served.files["models/org/tiny"] = {
            "config.json": b'{"model_type": "qwen3"}',
            "model.safetensors": b"x" * 4096,
            "original/model.safetensors": b"y" * 4096,
            "pytorch_model.bin": b"z" * 4096,
        }
        yield served


def _fetch(spelling: str, output: Output | None = None) -> list[Path]:
    return fetch_data(parse_hub(spelling, key="data.prompts"), key="prompts", output=output)


def test_a_split_is_fetched_said_first_and_taken_from_the_cache_without_the_hub(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = io.StringIO()
    files = _fetch("hf:org/sums:main:test", Output(stdout=io.StringIO(), stderr=told))
    assert [pq.read_table(file).column("question").to_pylist() for file in files] == [["1*1?"]]
    size = len(hub.files["datasets/org/sums"]["main/test-00000-of-00001.parquet"])
    assert (
        f"fetching the data set `org/sums` (main, commit {COMMIT[:12]}) from the hub: {size} B in "
        "1 file" in told.getvalue()
    )
    assert sorted(hub.fetched) == ["README.md", "main/test-00000-of-00001.parquet"]

    hub.fetched.clear()
    assert _fetch("hf:org/sums:main:test") == files
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert _fetch("hf:org/sums:main:test") == files
    assert not hub.fetched
    with pytest.raises(DataError, match="cannot be had from the hub") as caught:
        _fetch("hf:org/sums:main:train")
    assert "2 of 2 files are not in the cache" in caught.value.why
    assert any("hf download org/sums --repo-type dataset" in fix for fix in caught.value.fixes)


def test_the_parts_of_a_split_become_one_file_of_the_run(hub: LoopbackHub, tmp_path: Path) -> None:
    run = RunDir(path=tmp_path / "run")
    data = _absolute(
        Data(prompts="hf:org/sums:main:train", eval="hf:org/sums:main:test"), run, 0, output=None
    )
    assert pq.read_table(data.prompts).column("question").to_pylist() == ["1+0?", "0+1?", "2-1?"]
    assert Path(data.prompts or "").parent == run.data_dir
    assert data.eval is not None
    assert COMMIT in data.eval


def test_content_that_is_not_what_the_hub_tells_is_refused(hub: LoopbackHub) -> None:
    hub.lies.add("main/test-00000-of-00001.parquet")
    with pytest.raises(DataError, match="is spoilt") as caught:
        _fetch("hf:org/sums:main:test")
    assert "hash" in caught.value.why
    spoilt = Path(caught.value.fixes[0].removeprefix("rm ").partition(" #")[0].strip())
    assert spoilt.is_file()
    spoilt.unlink()
    hub.lies.clear()
    assert _fetch("hf:org/sums:main:test")


def test_a_model_is_fetched_once_without_what_other_frameworks_need(hub: LoopbackHub) -> None:
    lines = io.StringIO()
    folder = fetch_model(
        "org/tiny", revision=None, output=Output(Mode.JSON, stdout=lines, stderr=io.StringIO())
    )
    assert sorted(hub.fetched) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == b"x" * 4096
    last = json.loads(lines.getvalue().splitlines()[-1])
    assert last["kind"] == "progress"
    assert last["done_bytes"] == last["total_bytes"] == 4096 + len(b'{"model_type": "qwen3"}')


def test_what_the_disk_has_no_room_for_is_refused_before_a_byte_comes(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        hub_module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6 - 100, 100)
    )
    with pytest.raises(MachineError, match="does not fit on the disk") as caught:
        fetch_model("org/tiny", revision=None)
    assert caught.value.exit_code is ExitCode.NOT_READY
    assert "100 B are free" in caught.value.why
    assert not hub.fetched


def test_a_hub_that_is_gone_is_no_hindrance_for_what_was_fetched_and_is_named_at_once_for_what_was_not(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, config = _fetch("hf:org/sums:main:test"), fetch_config("org/tiny", revision="main")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}",
    )
    assert _fetch("hf:org/sums:main:test") == files
    assert fetch_config("org/tiny", revision="main") == config
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="cannot be had from the hub") as caught:
        fetch_config("org/other", revision=None)
    assert "config.json is not in the cache" in caught.value.why
    with pytest.raises(DataError, match="cannot be had from the hub"):
        _fetch("hf:org/other")
    assert time.monotonic() - began < 5.0  # the client alone would try for half a minute


def test_what_the_hub_does_not_have_is_refused_in_three_parts(hub: LoopbackHub) -> None:
    with pytest.raises(
        CheckpointError, match="neither a folder nor to be had from the hub"
    ) as caught:
        fetch_model("org/none", revision=None)
    assert "--set model.path=/path/to/a/copy" in caught.value.fixes
    with pytest.raises(DataError, match="neither a file nor to be had from the hub"):
        _fetch("hf:org/none:train")


def test_a_run_takes_model_and_data_from_the_hub(hub: LoopbackHub, tmp_path: Path) -> None:
    sums = {
        "data": {"prompts": "task:sums"},
        "model": {"scratch": {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 32}},
    }
    made = prepare(
        Recipe.model_validate(sums | {"rollout": {"reward": "gsm8k"}}),
        RunDir(path=tmp_path / "made"),
    )
    hub.files["models/org/tiny"] = {
        file.name: file.read_bytes() for file in made.model_dir.iterdir()
    }
    wish = {
        "model": {"path": "org/tiny"},
        "data": {"prompts": "hf:org/sums:main:train", "eval": "hf:org/sums:main:test"},
    }
    recipe = Recipe.model_validate(wish | {"rollout": {"reward": "gsm8k"}})
    assert facts_of_recipe(recipe.model).num_layers == 1
    assert hub.fetched == ["config.json"]

    found = prepare(recipe, RunDir(path=tmp_path / "run"))
    assert found.facts == made.facts
    assert [prompt.text for prompt in found.prompts.prompts] == ["1+0?", "0+1?", "2-1?"]
    assert [prompt.text for prompt in found.heldout] == ["1*1?"]
    assert found.reports["eval"].path.endswith("main/test-00000-of-00001.parquet")
