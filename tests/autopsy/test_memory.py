"""What the processes of an attempt held, as it is told."""

from __future__ import annotations

import json
from pathlib import Path

from milescli.autopsy.memory import read_memory


def test_the_curve_ends_with_the_last_look_and_kills_are_those_of_the_attempt(
    tmp_path: Path,
) -> None:
    looks = [
        {
            "time": 1.76e9 + 10 * i,
            "oom_kills": 4,
            "resident_bytes": {"11": i * 2**30, "12": 2**20, "13": 2**20},
            "names": {"11": "driver", "12": "engine-0-server", "13": "engine-0-server"},
        }
        for i in range(1, 101)
    ]
    end = {"time": 1.76e9 + 1002, "oom_kills": 5}
    text = "\n".join(json.dumps(record) for record in [*looks, end])
    (tmp_path / "memory.jsonl").write_text(text + "\n")
    memory = read_memory(tmp_path)
    assert [size >> 30 for _, size in memory.curve] == [1, 21, 41, 60, 80, 100]
    assert memory.peak == {"driver": 100 * 2**30, "engine-0-server": 2**21}
    assert memory.oom_kills == 1
    assert "100.0 GiB at" in memory.lines()[0]
    assert memory.lines()[-1].endswith("for want of memory: 1")


def test_a_process_without_a_name_is_called_by_its_number(tmp_path: Path) -> None:
    look = {"time": 1.76e9, "resident_bytes": {"11": 7, "12": 5}, "names": {"11": "driver"}}
    (tmp_path / "memory.jsonl").write_text(json.dumps(look) + "\n")
    assert read_memory(tmp_path).peak == {"driver": 7, "12": 5}


def test_without_a_record_nothing_is_claimed(tmp_path: Path) -> None:
    memory = read_memory(tmp_path)
    assert (memory.curve, memory.peak, memory.oom_kills) == ([], {}, None)
    assert memory.lines() == []
