"""The end of a file that grows."""

from __future__ import annotations

from pathlib import Path

from milescli.core.files import last_records


def test_the_last_records_are_read_without_those_long_before(tmp_path: Path) -> None:
    file = tmp_path / "memory.jsonl"
    assert list(last_records(file)) == []
    old = '{"n": 0}\n' * 20_000
    file.write_text(old + '{"n": 1}\n[2]\n{"n": 3}\n{"n": 4')
    found = list(last_records(file))
    assert [record["n"] for record in found[:3]] == [3, 1, 0]
    assert len(found) < 10_000
