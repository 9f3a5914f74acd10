"""The end of a file that grows; and what is no file at the place of one."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from milescli.core.files import UnreadableFile, last_records, path_error, read_regular_bytes


def test_the_last_records_are_read_without_those_long_before(tmp_path: Path) -> None:
    file = tmp_path / "memory.jsonl"
    assert list(last_records(file)) == []
    old = '{"n": 0}\n' * 20_000
    file.write_text(old + '{"n": 1}\n[2]\n{"n": 3}\n{"n": 4')
    found = list(last_records(file))
    assert [record["n"] for record in found[:3]] == [3, 1, 0]
    assert len(found) < 10_000


@pytest.mark.parametrize(
    ("make", "what_it_is"),
    [
        (os.mkfifo, "Not a regular file"),
        (os.mkdir, "Is a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "Not a regular file"),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    ],
)
def test_what_is_no_file_is_named_and_not_waited_for(
    tmp_path: Path, make: Callable[[Path], object], what_it_is: str
) -> None:
    file = tmp_path / "x y"
    make(file)
    with pytest.raises(UnreadableFile) as caught:
        read_regular_bytes(file)
    assert caught.value.fixes[0].startswith(f"ls -ld '{file}'")
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert isinstance(error, OSError) and error.strerror == what_it_is
        assert error.why.startswith(what_it_is) and str(file) in error.what


def test_what_the_system_refuses_for_the_path_s_sake_is_an_error_for_users(
    tmp_path: Path,
) -> None:
    locked = path_error(
        PermissionError(errno.EACCES, "Permission denied", "/their data/rows.jsonl")
    )
    assert locked is not None and locked.what == "`/their data/rows.jsonl` cannot be used"
    assert locked.fixes[0].startswith("ls -ld '/their data/rows.jsonl'")
    new = str(tmp_path / ".note-22015")
    refused = path_error(OSError(errno.EROFS, "Read-only file system", new))
    assert refused is not None and refused.fixes[0].startswith(f"findmnt -T {tmp_path} ")
    assert path_error(OSError(errno.EIO, "Input/output error", "rows.jsonl")) is None
    assert path_error(OSError(errno.EACCES, "Permission denied")) is None
