"""A run is read as it grows: only what is new, no torn line, a file that began anew from its
start."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.core.events import AdapterEvent, StepDone, to_record
from milescli.insight.reader import LineReader, RunReader, read_history
from tests.insight.planted import Planted


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def lines(planted: Planted) -> list[str]:
    return [
        json.dumps({"time": f"2026-11-25T10:00:{at % 60:02d}.500Z", **to_record(event)})
        for at, (_, event) in enumerate(planted.events())
    ]


def test_only_what_is_new_is_read_and_no_torn_line(run: RunDir) -> None:
    told = lines(Planted(steps=6, eval_every=0, ends=False))
    reader = RunReader(run)
    assert reader.update() == 0
    run.events_file.write_text("\n".join(told[:4]) + "\n" + told[4][:50])
    assert reader.update() == 4 and reader.history.step == 2
    with run.events_file.open("a") as file:
        file.write(told[4][50:] + "\n" + "\n".join(told[5:]) + "\n")
    assert reader.update() == len(told) - 4
    assert reader.history.step == 6
    assert reader.update() == 0


def test_a_file_that_began_anew_is_read_from_its_start(run: RunDir) -> None:
    told = lines(Planted(steps=6))
    run.events_file.write_text("\n".join(told) + "\n")
    reader = RunReader(run)
    reader.update()
    run.events_file.unlink()
    run.events_file.write_text("\n".join(told[:4]) + "\n")
    reader.update()
    assert reader.history.step == 1


def test_a_loss_that_is_no_number_and_lines_that_are_none_are_read_over(run: RunDir) -> None:
    told = lines(Planted(steps=2, at_steps={2: {"loss": math.nan}}))
    run.events_file.write_text("\n".join(["{torn", "[1]", '{"no": "event"}', *told]) + "\n")
    history = read_history(run)
    assert history.step == 2
    assert math.isnan(history.columns["train/loss"][1])


def test_a_resumed_run_goes_on_where_its_checkpoint_was(run: RunDir) -> None:
    told = lines(Planted(steps=10, eval_every=5))
    again = lines(Planted(steps=10, eval_every=5, seed=1))
    steps = [line for line in again if '"StepDone"' in line][6:]
    run.events_file.write_text("\n".join([*told, *steps]) + "\n")
    history = read_history(run)
    assert list(history.columns.steps) == list(range(1, 11))
    assert (
        history.columns["rollout/reward_mean"][7] == json.loads(steps[1])["rollout"]["reward_mean"]
    )
    assert [one.step for one in history.evaluations] == [0, 5]


def test_each_of_several_adapters_has_a_history_of_its_own(run: RunDir) -> None:
    records = [
        to_record(AdapterEvent(adapter=name, event=event))
        for name in ("sums", "words")
        for _, event in Planted(steps=3).events()
        if isinstance(event, StepDone)
    ]
    run.events_file.write_text("".join(json.dumps(record) + "\n" for record in records))
    history = read_history(run)
    assert history.step == 0
    assert {name: own.step for name, own in history.adapters.items()} == {"sums": 3, "words": 3}


def test_a_large_file_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("milescli.insight.reader.BLOCK_BYTES", 7)
    file = tmp_path / "lines"
    file.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(50)))
    records, is_new = LineReader(file).new()
    assert [record["n"] for record in records] == list(range(50)) and not is_new
