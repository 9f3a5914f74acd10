"""Assembles a folder that gets its name only when it is complete. Until then it grows next to the
target, with a journal of finished files, so that an interrupted conversion can continue. Finished
files are never discarded silently. Called by `conversion`. Also writes files of records that each
have a checksum."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from milescli.checkpoint.integrity import sync
from milescli.core.errors import CheckpointError
from milescli.core.files import open_regular, parse_json, read_regular_text
from milescli.core.units import format_bytes

JOURNAL_NAME = "journal.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedFile:
    """Records a complete and durable file."""

    name: str
    """Path within the folder."""
    size_bytes: int
    crc32: int
    read_back: bool = True
    """True if it was compared with what had been written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """Describes what an earlier attempt left in a part folder."""

    fingerprint: str | None = None
    """Fingerprint of the content that it wrote; None if it was interrupted before recording it."""
    command: str | None = None
    """Command that the user typed."""
    cwd: str | None = None
    """Working directory of the command."""
    finished: dict[str, FinishedFile] = field(default_factory=dict)
    """Files by name that are complete and still present."""

    @property
    def finished_bytes(self) -> int:
        """Return the bytes of all finished files."""
        return sum(file.size_bytes for file in self.finished.values())

    @property
    def resume_command(self) -> str | None:
        """Return the command that continues the attempt from this folder; None if it was not
        recorded."""
        if self.command is None or self.cwd in (None, os.getcwd()):
            return self.command
        return f"cd {shlex.quote(str(self.cwd))} && {self.command}"


def part_folder_of(target: Path) -> Path:
    """Return the folder in which `target` is assembled."""
    return target.with_name(f".{target.name}.part")


def read_journal(part: Path) -> Journal:
    """Read the journal of a part folder; empty if there is none. Skips entries that were torn when
    a process was killed."""
    try:
        text = read_regular_text(part / JOURNAL_NAME, errors="replace")
    except FileNotFoundError:
        return Journal()
    records = _records(text)
    head = next(records, {})
    finished = {}
    for record in records:
        try:
            file = FinishedFile(**record)  # type: ignore[arg-type]
        except TypeError:
            continue
        path = part / file.name
        if path.is_file() and path.stat().st_size == file.size_bytes:
            finished[file.name] = file
    return Journal(
        fingerprint=head.get("fingerprint"),  # type: ignore[arg-type]
        command=head.get("command"),  # type: ignore[arg-type]
        cwd=head.get("cwd"),  # type: ignore[arg-type]
        finished=finished,
    )


def _records(text: str) -> Iterator[dict[str, object]]:
    for line in text.splitlines():
        try:
            record = parse_json(line)
        except ValueError:
            continue  # torn by a kill while it was written
        if isinstance(record, dict):
            yield record


class PartFolder:
    """Manages `.NAME.part` next to the target. A context manager; one process at a time. If it ends
    without `complete` or `discard`, the folder stays, and the next PartFolder with the same
    `fingerprint` continues it."""

    def __init__(
        self,
        target: Path,
        *,
        fingerprint: str,
        command: str | None = None,
        read_back: bool = True,
    ) -> None:
        """Open or create the folder. `fingerprint`: covers everything that determines the written
        bytes. `command`: what the user types to continue; None if repeating the current command
        does. `read_back`: a file is finished only after it was read and compared. Raises
        CheckpointError if the target exists."""
        require_free(target)
        self.target, self.path, self.command = target, part_folder_of(target), command
        self.read_back = read_back
        self.finished: dict[str, FinishedFile] = {}
        """By name: what an earlier attempt left, and what was finished since."""
        self._fingerprint = fingerprint
        self._journal: int | None = None

    def __enter__(self) -> PartFolder:
        """Open the folder. Raises CheckpointError if another process writes it, if it holds files
        of another conversion, or if it cannot be written."""
        self._open()
        try:
            self._begin()
        except BaseException:
            self._close()
            raise
        return self

    def _open(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._journal = os.open(
                self.path / JOURNAL_NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644
            )
        except OSError as error:
            raise CheckpointError(
                f"`{self.target}` cannot be written",
                why=str(error),
                fix="choose a target that you can write to",
            ) from error
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._close()
            raise CheckpointError(
                f"another process is writing `{self.target}`",
                why=f"it holds the lock on {self.path / JOURNAL_NAME}",
                fix="wait for it to finish, or choose another name",
            ) from error

    def _begin(self) -> None:
        """Continue from the finished files, or begin with an empty folder."""
        assert self._journal is not None
        journal = read_journal(self.path)
        if journal.fingerprint == self._fingerprint:
            self.finished = {
                name: file
                for name, file in journal.finished.items()
                if file.read_back or not self.read_back
            }
            os.write(self._journal, b"\n")  # ends a line that a kill tore
            return
        leftovers = [path for path in self.path.iterdir() if path.name != JOURNAL_NAME]
        if journal.finished or (leftovers and journal.fingerprint is None):
            raise self._refusal(journal)
        for path in leftovers:  # begun, and not finished
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        os.ftruncate(self._journal, 0)
        self._append(
            {"fingerprint": self._fingerprint, "command": self.command, "cwd": os.getcwd()}
        )

    def _refusal(self, journal: Journal) -> CheckpointError:
        """Return the error for finished files of another conversion, which are not deleted
        silently."""
        remove = f"rm -r {shlex.quote(str(self.path))}   # throws it away; then once more"
        if not journal.finished:
            return CheckpointError(
                f"`{self.target}` cannot be created",
                why=f"{self.path} contains files, but no journal that describes them",
                fix=remove,
            )
        finished = (
            f"{format_bytes(journal.finished_bytes)} in {len(journal.finished)} "
            f"file{'s' if len(journal.finished) > 1 else ''} are finished and kept in {self.path}"
        )
        resume = journal.resume_command
        if resume is not None and resume == self.command:
            return CheckpointError(
                f"`{self.target}` was started from a source that has changed since",
                why=f"{finished}, which does not match the source as it is now",
                fix=remove,
            )
        return CheckpointError(
            f"`{self.target}` was started from another source or with other options",
            why=f"{finished}, which differ from what this command would write",
            fix=[*([f"{resume}   # continues it"] if resume else []), remove],
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None

    @property
    def finished_bytes(self) -> int:
        """Return the bytes of all finished files."""
        return sum(file.size_bytes for file in self.finished.values())

    def record_finished(self, file: FinishedFile) -> None:
        """Record a finished file durably."""
        self.finished[file.name] = file
        self._append(asdict(file))

    def _append(self, record: dict[str, object]) -> None:
        assert self._journal is not None
        os.write(self._journal, json.dumps(record).encode() + b"\n")
        os.fsync(self._journal)

    def complete(self) -> None:
        """Rename the complete and durable folder to its target."""
        (self.path / JOURNAL_NAME).unlink()
        sync_tree(self.path)
        if self.target.is_dir():
            self.target.rmdir()
        self.path.rename(self.target)
        sync(self.target.parent)

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


def require_free(target: Path) -> None:
    """Raise CheckpointError if something exists at `target`; an empty folder is allowed."""
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise CheckpointError(
            f"`{target}` already exists",
            why="miles never overwrites an existing folder",
            fix=[
                f"choose another name, for instance {target.with_name(target.name + '-2')}",
                f"rm -r {target}",
            ],
        )


def sync_tree(folder: Path) -> None:
    """Make every small file of the folder and every name durable; the writers of large files have
    synced them."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


_FRAME = struct.Struct("<4sIIQ")
"""Magic bytes, CRC-32 of all that follows it, size of the head, size of the body; in bytes."""
_MARK = b"mrec"
_CHUNK = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLocation:
    """Locates a record in a file."""

    path: Path
    offset: int
    size: int
    """Bytes, frame included."""


class RecordWriter:
    """Appends records to a file that only its owner can read. Unless its writer is killed, the file
    always ends after a complete record."""

    def __init__(self, path: Path) -> None:
        """Create the file, which must not exist. Raises OSError."""
        self.path = path
        self.size = 0
        """Bytes of whole records."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)

    def append(self, head: dict[str, Any], parts: Sequence[bytes] = ()) -> None:
        """Append a record. Raises OSError if the disk does not accept all of it; the file is then
        unchanged."""
        pieces = frame_record(json.dumps(head, separators=(",", ":")).encode(), parts)
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
        """Make the file durable and close it. Raises OSError."""
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)


def frame_record(head: bytes, parts: Sequence[bytes]) -> list[bytes]:
    """Return the pieces of one record in order: frame, head, and parts of the body."""
    body_size = sum(map(len, parts))
    crc = zlib.crc32(head, zlib.crc32(struct.pack("<IQ", len(head), body_size)))
    for part in parts:
        crc = zlib.crc32(part, crc)
    return [_FRAME.pack(_MARK, crc, len(head), body_size), head, *parts]


def intact_records(path: Path) -> Iterator[tuple[RecordLocation, dict[str, Any]]]:
    """Yield (location, head) of each record in order, up to the first torn or altered one. Checks
    bodies without keeping them. Raises OSError."""
    with open_regular(path) as file:
        left = os.fstat(file.fileno()).st_size
        while (record := _next(file, left)) is not None:
            head, size = record
            yield RecordLocation(path=path, offset=file.tell() - size, size=size), head
            left -= size


def read_record(place: RecordLocation) -> tuple[dict[str, Any], bytes]:
    """Return (head, body) of a record. Raises OSError, also if the record has changed since."""
    with open_regular(place.path) as file:
        file.seek(place.offset)
        body: list[bytes] = []
        record = _next(file, place.size, keep=body.append)
    if record is None:
        raise OSError(errno.EIO, "a record is not what was written", str(place.path))
    return record[0], b"".join(body)


def retain_records(path: Path, places: Sequence[RecordLocation]) -> None:
    """Rewrite the file with only these records. If interrupted, the file has its old content or the
    new one. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    with open_regular(path) as file, part.open("wb") as out:
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
    """Return (head, bytes of the record) of the next record within `left` bytes; None if it is
    incomplete. `keep` receives the body."""
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
    record = parse_json(head)
    return (record, size) if isinstance(record, dict) else None
