"""Files that no run needs: a full disk is told of once, and spoils nothing that comes after."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir, read_jsonl
from milescli.core.events import EventBus, Notice, PhaseStarted
from milescli.runtime.recording.listeners import attach_run_files
from milescli.runtime.recording.side_files import LineFile, SideFiles

FULL = Path("/dev/full")
"""Linux's own full disk: every write to it fails."""


def test_a_file_that_cannot_be_written_is_told_of_once_for_its_folder(tmp_path: Path) -> None:
    heard: list[Notice] = []
    side = SideFiles(EventBus([heard.append]))
    (tmp_path / "a file").write_text("")
    for name in ("step_1.jsonl", "step_2.jsonl"):
        side.write(tmp_path / "a file" / name, "text")
    side.write(tmp_path / "kept" / "step_3.jsonl", "text")
    assert [notice.level for notice in heard] == ["warning"]
    assert "step_1.jsonl" in heard[0].text and "are free there" in heard[0].text
    assert (tmp_path / "kept" / "step_3.jsonl").read_text() == "text"


def test_a_line_that_the_disk_does_not_take_is_an_error() -> None:
    with pytest.raises(OSError, match="No space"):
        LineFile(FULL).write("{}")


def test_the_line_after_a_torn_one_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = LineFile(tmp_path / "events.jsonl")
    with monkeypatch.context() as full:
        write = file.os_write
        full.setattr(file, "os_write", lambda number, data: write(number, data[:5]))
        with pytest.raises(OSError, match="No space"):
            file.write(json.dumps({"step": 1}))
    file.write(json.dumps({"step": 2}))
    assert list(read_jsonl(file.path)) == [{"step": 2}]


def test_the_line_after_one_that_a_dead_process_left_torn_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text('{"step": 1}\n{"step"')
    LineFile(file).write(json.dumps({"step": 3}))
    LineFile(file).write(json.dumps({"step": 4}))
    assert [record["step"] for record in read_jsonl(file)] == [1, 3, 4]


def test_events_reach_the_others_where_the_log_cannot_be_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.events_file.symlink_to(FULL)
    seen: list[object] = []
    bus = EventBus()
    attach_run_files(bus, run)
    bus.listeners.append(seen.append)
    for phase in ("start", "train"):
        bus.emit(PhaseStarted(phase=phase))
    phases = [event.phase for event in seen if isinstance(event, PhaseStarted)]
    assert phases == ["start", "train"]
    assert sum(isinstance(event, Notice) for event in seen) == 1
