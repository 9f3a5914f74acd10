"""JSON from outside: whatever it is, reading it ends, with one kind of error."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from milescli.core import files
from milescli.core.files import parse_json, read_json

CODE = Path(__file__).parents[2] / "milescli"
OURS = {
    "agents/foreign": "runs as a program of its own, without miles",
    "backends/sglang/inside/remote.py": "an order of a trainer rank",
    "backends/sglang/inside/shards.py": "an order of a trainer rank",
    "backends/sglang/launch": "lines between our own processes",
    "backends/sglang/weights": "replies of our own plug-in",
    "core/driver_pipe.py": "lines of our own driver",
    "core/files.py": "the reader",
    "doctor": "replies of our own trials",
    "profiling/traces.py": "traces that torch has written",
    "rollout/rewards/code/harness.py": "runs in the sandbox, without miles",
    "sandbox/local.py": "an argument that we write",
    "workers/frames.py": "lines of our own workers",
}
"""Files that may call `json.loads` themselves, and why."""


@pytest.mark.parametrize(
    "text",
    ['{"a":' * 100_000, "[" * 100_000, "9" * 6000, "{", "", b"\xff\xfe\xfa", b'"\xed\xa0\x80"'],
    ids=["objects", "lists", "digits", "cut", "nothing", "no text", "a lone surrogate"],
)
def test_what_is_no_json_is_one_kind_of_error(text: str | bytes) -> None:
    with pytest.raises(json.JSONDecodeError):
        parse_json(text)


def test_what_is_no_file_is_refused_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    for name, words in (
        ("fifo", "Not a regular file"),
        ("zero", "Not a regular file"),
        ("loop", "symbolic links"),
        ("", "Is a directory"),
        ("gone", "No such file"),
    ):
        with pytest.raises(OSError, match=words):
            read_json(tmp_path / name)
    (tmp_path / "a.json").write_text('{"a": [1, NaN]}')
    assert str(read_json(tmp_path / "a.json")) == "{'a': [1, nan]}"
    monkeypatch.setattr(files, "MAX_BYTES", 10)
    with pytest.raises(OSError, match="Larger than 10 bytes"):
        read_json(tmp_path / "a.json")


def test_json_from_outside_is_read_by_the_reader_alone() -> None:
    calls = [
        str(file.relative_to(CODE))
        for file in sorted(CODE.rglob("*.py"))
        if re.search(r"\bjson\.loads?\(", file.read_text(encoding="utf-8"))
    ]
    others = [name for name in calls if not name.startswith(tuple(OURS))]
    assert others == []
