"""What wandb keeps offline, read from its own file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("wandb", reason="wandb is not installed")

from wandb.proto.wandb_internal_pb2 import Record

from milescli.trackers.wandb import WeightsAndBiases
from tests.trackers.running import events, run_in, tell

pytestmark = pytest.mark.slow

HEADER, BLOCK = 7, 32768
FIRST_PART, MIDDLE, LAST = 2, 3, 4


def kept(folder: Path) -> Iterator[Record]:
    """The records of all files: a log of blocks, as LevelDB writes it, after a header of 7 bytes.
    A record that spans blocks has parts."""
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data, at, parts = file.read_bytes(), HEADER, b""
        while at + HEADER <= len(data):
            if BLOCK - at % BLOCK < HEADER:
                at += BLOCK - at % BLOCK
                continue
            size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            parts += data[at + HEADER : at + HEADER + size]
            at += HEADER + size
            if kind not in (FIRST_PART, MIDDLE):
                yield Record.FromString(parts)
                parts = b""


def numbers(record: Record) -> dict[str, object]:
    return {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for item in record.history.item
    }


def test_two_adapters_have_a_run_each_with_recipe_and_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("sums", "words"):
        (tmp_path / name).mkdir()
    first = WeightsAndBiases(run=run_in(tmp_path / "sums"))
    second = WeightsAndBiases(run=run_in(tmp_path / "words", mark="of-its-own"))
    tell(first, events(1, 2))
    tell(second, events(1), outcome="failed")
    records = list(kept(tmp_path / "sums"))
    [run] = [one.run for one in records if one.HasField("run")]
    assert (run.run_id, run.project, run.display_name) == ("sums-1-4f2a90c1", "sums", "sums-1")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["train.steps"] == 4 and config["rollout.reward"] == {"math": 1.0}
    history = [numbers(one) for one in records if one.HasField("history")]
    steps = [(one["step"], one["train/grad_norm"]) for one in history if "train/grad_norm" in one]
    assert steps == [(1, 0.83), (2, 0.83)]
    assert [one["eval/accuracy"] for one in history if "eval/accuracy" in one] == [0.5]
    [end] = [one.exit for one in kept(tmp_path / "words") if one.HasField("exit")]
    assert end.exit_code == 1
    said = capfd.readouterr()
    assert not said.out, "stdout is the run's own"
