"""A folder that grows beside its place: what is finished stays, goes on, and is never thrown away
in silence."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from milescli.checkpoint.journal import (
    JOURNAL_NAME,
    FinishedFile,
    PartFolder,
    part_of,
    read_journal,
)
from milescli.core.errors import CheckpointError


def _finish(part: PartFolder, name: str, content: bytes = b"content") -> None:
    (part.path / name).write_bytes(content)
    part.finish_file(FinishedFile(name=name, size_bytes=len(content), crc32=0))


def _left(target: Path, *names: str, fingerprint: str = "a", command: str | None = "go") -> Path:
    """What an interrupted attempt leaves."""
    with PartFolder(target, fingerprint=fingerprint, command=command) as part:
        for name in names:
            _finish(part, name)
    return part_of(target)


def test_the_next_one_of_the_same_fingerprint_goes_on(tmp_path: Path) -> None:
    target = tmp_path / "out"
    part_path = _left(target, "one", "two")
    (part_path / "two").unlink()
    with (part_path / JOURNAL_NAME).open("a") as journal:
        journal.write('{"name": "three", "size')  # torn by a kill
    with PartFolder(target, fingerprint="a") as part:
        assert list(part.finished) == ["one"] and part.finished_bytes == len(b"content")
        _finish(part, "two")
    with PartFolder(target, fingerprint="a") as part:
        assert list(part.finished) == ["one", "two"]
        part.complete()
    assert sorted(path.name for path in target.iterdir()) == ["one", "two"]
    assert not part_path.exists()


def test_finished_work_of_another_fingerprint_is_refused_with_both_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "my out"
    monkeypatch.chdir(tmp_path)
    part_path = _left(target, "one", command="miles convert 'a b'")
    before = (part_path / JOURNAL_NAME).read_bytes()
    with (
        pytest.raises(CheckpointError, match="with other options") as caught,
        PartFolder(target, fingerprint="b", command="miles convert c"),
    ):
        pass
    assert caught.value.exit_code == 6
    assert caught.value.fixes[0] == "miles convert 'a b'   # goes on with it"
    assert shlex.split(caught.value.fixes[1], comments=True) == ["rm", "-r", str(part_path)]
    assert (part_path / JOURNAL_NAME).read_bytes() == before and (part_path / "one").exists()
    monkeypatch.chdir("/")
    assert read_journal(part_path).resume_command == f"cd {tmp_path} && miles convert 'a b'"


def test_the_same_command_with_another_fingerprint_means_that_the_source_changed(
    tmp_path: Path,
) -> None:
    _left(tmp_path / "out", "one", command="go")
    with (
        pytest.raises(CheckpointError, match="changed since") as caught,
        PartFolder(tmp_path / "out", fingerprint="b", command="go"),
    ):
        pass
    assert len(caught.value.fixes) == 1 and caught.value.fixes[0].startswith("rm -r ")


def test_what_was_not_read_back_is_not_finished_for_one_who_wants_it_read_back(
    tmp_path: Path,
) -> None:
    with PartFolder(tmp_path / "out", fingerprint="a", read_back=False) as part:
        (part.path / "one").write_bytes(b"1")
        part.finish_file(FinishedFile(name="one", size_bytes=1, crc32=0, read_back=False))
        _finish(part, "two")
    with PartFolder(tmp_path / "out", fingerprint="a") as part:
        assert list(part.finished) == ["two"]
    with PartFolder(tmp_path / "out", fingerprint="a", read_back=False) as part:
        assert list(part.finished) == ["one", "two"]


def test_what_was_begun_and_not_finished_is_no_loss(tmp_path: Path) -> None:
    part_path = _left(tmp_path / "out")
    (part_path / "half").write_bytes(b"ha")
    (part_path / "folder").mkdir()
    with PartFolder(tmp_path / "out", fingerprint="b", command="other") as part:
        assert part.finished == {}
        assert [path.name for path in part_path.iterdir()] == [JOURNAL_NAME]
        assert read_journal(part_path).command == "other"


def test_files_of_nobody_are_not_thrown_away(tmp_path: Path) -> None:
    part_path = part_of(tmp_path / "out")
    part_path.mkdir()
    (part_path / "thesis.txt").write_text("years of work")
    with (
        pytest.raises(CheckpointError, match="cannot be begun"),
        PartFolder(tmp_path / "out", fingerprint="a"),
    ):
        pass
    assert (part_path / "thesis.txt").read_text() == "years of work"


def test_two_at_once_do_not_write_one_target(tmp_path: Path) -> None:
    with (
        PartFolder(tmp_path / "out", fingerprint="a"),
        pytest.raises(CheckpointError, match="another process"),
        PartFolder(tmp_path / "out", fingerprint="a"),
    ):
        pass
