"""What the watchdog keeps of the memory of a run's processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from milescli.platform import memory_record
from milescli.platform.memory_record import (
    FILE,
    MemoryRecord,
    last_sample,
    oom_kills,
    peak_resident_bytes,
    recorded_pids,
    resident_bytes,
)
from tests.waiting import until


def _records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / memory_record.FILE).read_text().splitlines()]


def test_processes_are_named_by_the_log_that_they_write_and_the_last_sample_is_kept(
    tmp_path: Path,
) -> None:
    with (tmp_path / "trainer-rank-0.log").open("w") as log:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, stdout=log)
    memory = MemoryRecord(driver=os.getpid(), folder=tmp_path)
    memory.sample([child.pid])
    memory.sample([child.pid])  # not yet due
    assert len(_records(tmp_path)) == 1
    child.kill()
    child.communicate()
    memory.end()
    first, last, end = _records(tmp_path)
    me, rank = str(os.getpid()), str(child.pid)
    assert first["names"] == last["names"] == {me: "driver", rank: "trainer-rank-0"}
    assert first["resident_bytes"][rank] > 0
    assert "resident_bytes" not in end


def test_the_peak_is_told_without_what_others_answer_for_of_shared_pages(tmp_path: Path) -> None:
    held = 400 * 2**20
    forks = (
        "import os, sys; "
        f"whole = b'x' * {held}; "
        "child = os.fork(); "
        r"os.write(1, b'%d\n' % (child or os.getppid())); "
        "sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", forks], stdin=-1, stdout=-1, text=True)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()), int(parent.stdout.readline())]
    MemoryRecord(driver=None, folder=tmp_path).sample(pids)
    parent.communicate()
    (look,) = _records(tmp_path)
    for pid in map(str, pids):
        assert look["resident_bytes"][pid] > held, "as top shows it"
        assert held / 2 < look["peak_bytes"][pid] < 0.75 * held, "a half of what both hold"


def test_a_process_without_a_log_is_named_by_its_command_or_its_module(tmp_path: Path) -> None:
    module = subprocess.Popen([sys.executable, "-m", "code"], stdin=-1, stdout=-3, stderr=-3)
    command = subprocess.Popen(["sleep", "60"])
    for child in (module, command):  # Popen may return before the kernel has the words
        until(Path(f"/proc/{child.pid}/cmdline").read_bytes, "the words of a process")
    memory = MemoryRecord(driver=os.getpid(), folder=tmp_path)
    memory.sample([module.pid, command.pid])
    for child in (module, command):
        child.kill()
        child.communicate()
    names = _records(tmp_path)[0]["names"]
    assert (names[str(module.pid)], names[str(command.pid)]) == ("code", "sleep")


def test_the_file_is_bounded_and_keeps_its_first_and_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_record, "INTERVAL_S", 0.0)
    monkeypatch.setattr(memory_record, "MAX_LINES", 10)
    memory = MemoryRecord(driver=os.getpid(), folder=tmp_path)
    for _ in range(95):
        memory.sample([])
    first = _records(tmp_path)[0]
    memory.sample([])
    kept = _records(tmp_path)
    assert len(kept) <= 10 and kept[0] == first
    assert kept[-1]["time"] >= kept[-2]["time"] >= first["time"]


def test_nothing_is_kept_before_there_is_a_folder() -> None:
    memory = MemoryRecord(driver=None)
    memory.sample([os.getpid()])
    memory.end()


def test_another_watchdog_learns_who_was_there(tmp_path: Path) -> None:
    assert recorded_pids(tmp_path) == set()
    memory = MemoryRecord(driver=None, folder=tmp_path)
    memory.sample([os.getpid()])
    memory.end()
    with (tmp_path / memory_record.FILE).open("a") as torn:
        torn.write('{"resident_bytes": {"12')
    assert recorded_pids(tmp_path) == {os.getpid()}


def test_the_last_sample_is_read_off_the_end_of_a_long_record(tmp_path: Path) -> None:
    assert last_sample(tmp_path) == {}
    names = {"1": "driver", "2": "engine-0", "3": "engine-0"}
    look = {"resident_bytes": {"1": 5, "2": 7, "3": 11}, "names": names}
    lines = ["x" * 2**17, json.dumps(look), json.dumps({"oom_kills": 0})]
    (tmp_path / FILE).write_text("\n".join(lines) + '\n{"resident_bytes": {"1": 9')
    assert last_sample(tmp_path) == {"driver": 5, "engine-0": 18}


def test_a_process_knows_the_most_that_it_ever_held() -> None:
    held = resident_bytes(os.getpid())
    assert held is not None and peak_resident_bytes() >= 0.9 * held


@pytest.mark.parametrize(
    ("membership", "file", "text"),
    [
        ("0::/job/one\n", "job/one/memory.events", "low 0\noom 5\noom_kill 3\n"),
        ("0::/not/seen/from/here\n", "memory.events", "oom_kill 3\noom_group_kill 0\n"),
        (
            "3:cpu:/\n4:memory:/a\n0::/\n",
            "memory/a/memory.oom_control",
            "under_oom 0\noom_kill 3\n",
        ),
    ],
)
def test_the_count_of_this_group_is_read(
    tmp_path: Path, membership: str, file: str, text: str
) -> None:
    (tmp_path / "cgroup").write_text(membership)
    (tmp_path / "fs" / file).parent.mkdir(parents=True)
    (tmp_path / "fs" / file).write_text(text)
    assert oom_kills(root=tmp_path / "fs", membership=tmp_path / "cgroup") == 3


def test_a_system_that_does_not_say_is_not_taken_for_none(tmp_path: Path) -> None:
    assert oom_kills(root=tmp_path, membership=tmp_path / "missing") is None
    (tmp_path / "cgroup").write_text("0::/\n")
    assert oom_kills(root=tmp_path, membership=tmp_path / "cgroup") is None
