"""A folder that grows beside its place: what is finished stays, goes on, and is never thrown away
in silence."""

from __future__ import annotations

import resource
import shlex
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.checkpoint.journal import (
    JOURNAL_NAME,
    FinishedFile,
    PartFolder,
    RecordWriter,
    intact_records,
    part_folder_of,
    read_journal,
    read_record,
    retain_records,
)
from milescli.core.errors import CheckpointError


def _finish(part: PartFolder, name: str, content: bytes = b"content") -> None:
    (part.path / name).write_bytes(content)
    part.record_finished(FinishedFile(name=name, size_bytes=len(content), crc32=0))


def _left(target: Path, *names: str, fingerprint: str = "a", command: str | None = "go") -> Path:
    """What an interrupted attempt leaves."""
    with PartFolder(target, fingerprint=fingerprint, command=command) as part:
        for name in names:
            _finish(part, name)
    return part_folder_of(target)


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
    assert caught.value.fixes[0] == "miles convert 'a b'   # continues it"
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
        part.record_finished(FinishedFile(name="one", size_bytes=1, crc32=0, read_back=False))
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
    part_path = part_folder_of(tmp_path / "out")
    part_path.mkdir()
    (part_path / "thesis.txt").write_text("years of work")
    with (
        pytest.raises(CheckpointError, match="cannot be created"),
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


RECORDS = [({"n": n, "text": "é" * n}, [bytes([n]) * n, b"", b"ab" * n]) for n in range(5)]


def _written(folder: Path) -> Path:
    writer = RecordWriter(folder / "some")
    for head, parts in RECORDS:
        writer.append(head, parts)
    writer.close()
    return writer.path


def _heads(path: Path) -> list[dict]:
    return [head for _, head in intact_records(path)]


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = _written(tmp_path)
    assert path.stat().st_mode & 0o077 == 0
    read = [read_record(place) for place, _ in intact_records(path)]
    assert read == [(head, b"".join(parts)) for head, parts in RECORDS]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_torn_or_changed_record_ends_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = _written(tmp_path_factory.mktemp("records"))
    content = bytearray(path.read_bytes())
    ends = [place.offset + place.size for place, _ in intact_records(path)]
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[at:]
    else:
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    whole = sum(end <= at for end in ends)
    assert _heads(path) == [head for head, _ in RECORDS[:whole]]


def test_others_are_left_out(tmp_path: Path) -> None:
    path = _written(tmp_path)
    places = [place for place, _ in intact_records(path)]
    retain_records(path, [places[1], places[4]])
    assert _heads(path) == [RECORDS[1][0], RECORDS[4][0]]
    with pytest.raises(OSError, match="not what was written"):
        read_record(places[4])


def test_of_a_record_that_the_disk_does_not_take_nothing_stays(tmp_path: Path) -> None:
    """A bound on the size of files stands for a full disk."""
    writer = RecordWriter(tmp_path / "some")
    writer.append({"n": 0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (writer.size + 100, before[1]))
    try:
        with pytest.raises(OSError):
            writer.append({"n": 1}, [bytes(1000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert writer.path.stat().st_size == writer.size
    writer.append({"n": 2})
    writer.close()
    assert _heads(writer.path) == [{"n": 0}, {"n": 2}]
