"""The kernel's count of processes that it ended for want of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from milescli.platform.oom import oom_kills


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
