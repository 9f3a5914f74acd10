"""Files of records that are appended to, each with its lengths and a checksum, so that what a kill
or a full disk has torn is seen and left out. Knows nothing of what is in a record: a JSON head, and
bytes. Called by the journal of samples."""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_FRAME = struct.Struct("<4sIIQ")
"""Mark, CRC-32 of all that follows it, size of the head, size of the body; in bytes."""
_MARK = b"mrec"
_CHUNK = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a record is."""

    path: Path
    offset: int
    size: int
    """Bytes, frame included."""


class RecordWriter:
    """A file that only its owner can read, and that always ends behind a whole record, unless its
    writer is killed."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where it cannot be made; there is no file of this name yet."""
        self.path = path
        self.size = 0
        """Bytes of whole records."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)

    def append(self, head: dict[str, Any], parts: Sequence[bytes] = ()) -> None:
        """Raises OSError where the disk does not take all of it: nothing of it stays."""
        pieces = framed(json.dumps(head, separators=(",", ":")).encode(), parts)
        try:
            for piece in pieces:
                rest = memoryview(piece)
                while rest:
                    if not (count := os.write(self._file, rest)):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
                    rest = rest[count:]
        except OSError:
            os.ftruncate(self._file, self.size)
            raise
        self.size += sum(map(len, pieces))

    def close(self) -> None:
        """Make it durable. Raises OSError."""
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)


def framed(head: bytes, parts: Sequence[bytes]) -> list[bytes]:
    """The pieces of one record, in order."""
    body_size = sum(map(len, parts))
    crc = zlib.crc32(head, zlib.crc32(struct.pack("<IQ", len(head), body_size)))
    for part in parts:
        crc = zlib.crc32(part, crc)
    return [_FRAME.pack(_MARK, crc, len(head), body_size), head, *parts]


def whole_records(path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Each record's place and head, in order, up to the first that is torn or changed; bodies are
    read through, and not held. Raises OSError."""
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        while (found := _next(file, left)) is not None:
            head, size = found
            yield Place(path=path, offset=file.tell() - size, size=size), head
            left -= size


def read_record(place: Place) -> tuple[dict[str, Any], bytes]:
    """(head, body). Raises OSError, also where it is no longer the record that was there."""
    with place.path.open("rb") as file:
        file.seek(place.offset)
        body: list[bytes] = []
        found = _next(file, place.size, keep=body.append)
    if found is None:
        raise OSError(errno.EIO, "a record is not what was written", str(place.path))
    return found[0], b"".join(body)


def keep_only(path: Path, places: Sequence[Place]) -> None:
    """Leave out all other records; the file has its old content or the new one. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    with path.open("rb") as file, part.open("wb") as out:
        os.fchmod(out.fileno(), 0o600)
        for place in places:
            file.seek(place.offset)
            out.write(file.read(place.size))
        out.flush()
        os.fsync(out.fileno())
    part.replace(path)


def _next(
    file: IO[bytes], left: int, *, keep: Callable[[bytes], object] = len
) -> tuple[dict[str, Any], int] | None:
    """(head, bytes of the record) of what comes next within `left` bytes; None where it is no whole
    record. `keep` is given the body."""
    frame = file.read(_FRAME.size)
    if len(frame) < _FRAME.size:
        return None
    mark, expected, head_size, body_size = _FRAME.unpack(frame)
    size = _FRAME.size + head_size + body_size
    if mark != _MARK or size > left:
        return None
    head = file.read(head_size)
    crc = zlib.crc32(head, zlib.crc32(struct.pack("<IQ", head_size, body_size)))
    unread = body_size
    while unread and (chunk := file.read(min(unread, _CHUNK))):
        crc, unread = zlib.crc32(chunk, crc), unread - len(chunk)
        keep(chunk)
    if unread or crc != expected:
        return None
    record = json.loads(head)
    return (record, size) if isinstance(record, dict) else None
