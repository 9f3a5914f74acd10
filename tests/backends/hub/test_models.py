"""Models of the hub are fetched once, checked and kept; by the real client against a hub on
loopback."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from milescli.backends.hub.models import fetch_config, fetch_model
from milescli.console.output import Mode, Output
from milescli.core.errors import CheckpointError, ExitCode, MachineError
from tests.loopback_hub import LoopbackHub, no_hub_for


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
    hub.fetched.clear()
    assert fetch_model("org/tiny", revision=None) == folder
    assert not hub.fetched


def test_what_the_disk_has_no_room_for_is_refused_before_a_byte_comes(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6 - 100, 100)
    )
    with pytest.raises(MachineError, match="does not fit on the disk") as caught:
        fetch_model("org/tiny", revision=None)
    assert caught.value.exit_code is ExitCode.NOT_READY
    assert "100 B are free" in caught.value.why
    assert not hub.fetched


def test_without_the_hub_what_was_fetched_will_do_and_the_rest_is_refused_without_waiting(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fetch_config("org/tiny", revision="main")
    no_hub_for(monkeypatch)
    assert fetch_config("org/tiny", revision="main") == config
    with pytest.raises(CheckpointError, match="cannot be downloaded from the hub") as caught:
        fetch_config("org/other", revision=None)
    assert "config.json is not in the cache" in caught.value.why


def test_without_the_hub_a_cache_of_another_client_will_do_if_no_part_is_missing(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = hub.files["models/org/tiny"]
    whole = files.pop("model.safetensors")
    parts = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    files |= {name: whole + name.encode() for name in parts}
    folder = fetch_model("org/tiny", revision=None)
    shutil.rmtree(folder.parents[1] / "trees")
    no_hub_for(monkeypatch)
    assert fetch_model("org/tiny", revision=None) == folder
    (folder / parts[1]).unlink()
    with pytest.raises(CheckpointError, match="cannot be downloaded from the hub") as caught:
        fetch_model("org/tiny", revision=None)
    assert f"1 of 3 files are not in the cache {folder.parents[1]}: {parts[1]}" in caught.value.why


def test_what_the_hub_does_not_have_is_refused_in_three_parts(hub: LoopbackHub) -> None:
    with pytest.raises(
        CheckpointError, match="neither a folder nor available on the hub"
    ) as caught:
        fetch_model("org/none", revision=None)
    assert "--set model.path=/path/to/a/copy" in caught.value.fixes


def test_a_model_without_a_config_is_refused(hub: LoopbackHub) -> None:
    hub.files["models/org/bare"] = {"model.safetensors": b"x" * 64}
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        fetch_model("org/bare", revision=None)


def test_a_file_that_was_cut_short_in_the_cache_is_named(hub: LoopbackHub) -> None:
    folder = fetch_model("org/tiny", revision=None)
    Path(folder / "model.safetensors").resolve().write_bytes(b"x" * 10)
    with pytest.raises(CheckpointError, match="is corrupt") as caught:
        fetch_model("org/tiny", revision=None)
    assert "10 bytes" in caught.value.why
