"""Whatever is torn off or flipped, what comes before it is read, and nothing else."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.checkpoint.checked_records import (
    RecordWriter,
    keep_only,
    read_record,
    whole_records,
)

RECORDS = [({"n": n, "text": "é" * n}, [bytes([n]) * n, b"", b"ab" * n]) for n in range(5)]


def _written(folder: Path) -> Path:
    writer = RecordWriter(folder / "some")
    for head, parts in RECORDS:
        writer.append(head, parts)
    writer.close()
    return writer.path


def _heads(path: Path) -> list[dict]:
    return [head for _, head in whole_records(path)]


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = _written(tmp_path)
    assert path.stat().st_mode & 0o077 == 0
    read = [read_record(place) for place, _ in whole_records(path)]
    assert read == [(head, b"".join(parts)) for head, parts in RECORDS]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_torn_or_changed_record_ends_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = _written(tmp_path_factory.mktemp("records"))
    content = bytearray(path.read_bytes())
    ends = [place.offset + place.size for place, _ in whole_records(path)]
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
    places = [place for place, _ in whole_records(path)]
    keep_only(path, [places[1], places[4]])
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
