"""Writes files from a stream of tensors: one thread makes them, one writes, one reads them back and
compares. The largest tensor and a small queue bound the memory. Called by convert and export."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from milescli.checkpoint.files import StreamFile, as_bytes, crc32_of, crc32_of_file
from milescli.checkpoint.journal import FinishedFile, PartFolder
from milescli.core.errors import DISK_FULL, CheckpointError

QUEUE_BYTES = 128 * 2**20
"""Bytes of tensors that wait to be written, besides the one that is being made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Holds a tensor and the bytes around it in the file."""

    name: str
    """Name, for errors."""
    tensor: torch.Tensor
    """Tensor of any shape; its elements are written in order."""
    around: Callable[[int], tuple[bytes, bytes]] | None = None
    """CRC-32 of the tensor's bytes -> (bytes before, bytes after)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """Describes a file that will be written."""

    name: str
    """Path within the folder."""
    size_bytes: int
    make: Callable[[], Iterable[Piece]]
    """Makes its tensors, in order. Called in the caller's thread."""
    start: bytes = b""
    """Bytes before the first tensor."""


class DiskFull(Exception):
    """Reports that the file system is full. `__cause__` is its error."""


@dataclass(slots=True)
class _Write:
    file: PlannedFile
    piece: Piece | None
    """None: the file ends here."""
    crc32: int = 0


class _OtherThreadFailed(Exception):
    """Stops a thread after another one has failed; `Pipeline.failure` holds the cause."""


class Pipeline:
    """Writes planned files into a part folder. `run` may be called once."""

    def __init__(self, part: PartFolder, *, progress: Callable[[int], None]) -> None:
        """Write into `part`. `progress`: receives the number of bytes as they are written, from a
        thread."""
        self._part, self._progress = part, progress
        self._condition = threading.Condition()
        self._queue: deque[_Write | None] = deque()
        self._queued = 0
        self._to_check: deque[
            tuple[PlannedFile, StreamFile, list[tuple[str, int, int, int]]] | None
        ] = deque()
        self._failure: BaseException | None = None

    def run(self, files: Sequence[PlannedFile]) -> None:
        """Write all files that the folder's journal does not list. Raises the error of making,
        writing or reading back a file, such as DiskFull."""
        threads = [
            threading.Thread(target=self._guarded, args=(work,), daemon=True)
            for work in (self._write_all, self._check_all)
        ]
        for thread in threads:
            thread.start()
        try:
            for file in files:
                if file.name not in self._part.finished:
                    self._make(file)
            self._put(None)
        except _OtherThreadFailed:
            pass
        except BaseException as error:
            self._fail(error)
        for thread in threads:
            thread.join()
        if self._failure is not None:
            if isinstance(self._failure, OSError) and self._failure.errno in DISK_FULL:
                raise DiskFull from self._failure
            raise self._failure

    def _make(self, file: PlannedFile) -> None:
        for piece in file.make():
            data = as_bytes(piece.tensor.contiguous())
            self._put(
                _Write(
                    file, Piece(name=piece.name, tensor=data, around=piece.around), crc32_of(data)
                ),
                size=data.numel(),
            )
        self._put(_Write(file, None))

    def _put(self, item: _Write | None, *, size: int = 0) -> None:
        with self._condition:
            while self._failure is None and self._queued and self._queued + size > QUEUE_BYTES:
                self._condition.wait()
            if self._failure is not None:
                raise _OtherThreadFailed
            self._queued += size
            self._queue.append(item)
            self._condition.notify_all()

    def _take(self, queue: deque):
        with self._condition:
            while not queue:
                if self._failure is not None:
                    raise _OtherThreadFailed
                self._condition.wait()
            if self._failure is not None:
                raise _OtherThreadFailed
            return queue.popleft()

    def _fail(self, error: BaseException) -> None:
        with self._condition:
            self._failure = self._failure or error
            self._condition.notify_all()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except _OtherThreadFailed:
            pass
        except BaseException as error:  # raised again by `run`
            self._fail(error)

    def _write_all(self) -> None:
        while (first := self._take(self._queue)) is not None:
            self._write_file(first)
        self._queue_for_check(None)

    def _write_file(self, item: _Write) -> None:
        path = self._part.path / item.file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        pieces: list[tuple[str, int, int, int]] = []
        try:
            with StreamFile(path) as stream:
                stream.write(item.file.start)
                while item.piece is not None:
                    data = item.piece.tensor
                    before, trailer = (
                        item.piece.around(item.crc32) if item.piece.around else (b"", b"")
                    )
                    stream.write(before)
                    pieces.append((item.piece.name, stream.size, data.numel(), item.crc32))
                    stream.write_tensor(data, crc32=item.crc32)
                    stream.write(trailer)
                    self._release(data.numel())
                    item = self._take(self._queue)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        assert stream.size == item.file.size_bytes, (
            item.file.name,
            stream.size,
            item.file.size_bytes,
        )
        self._queue_for_check((item.file, stream, pieces))

    def _release(self, size: int) -> None:
        with self._condition:
            self._queued -= size
            self._condition.notify_all()
        self._progress(size)

    def _queue_for_check(self, item) -> None:
        with self._condition:
            self._to_check.append(item)
            self._condition.notify_all()

    def _check_all(self) -> None:
        while (item := self._take(self._to_check)) is not None:
            file, stream, pieces = item
            read_back = self._part.read_back
            if read_back and crc32_of_file(stream.path) != stream.crc32:
                raise _readback_error(stream.path, pieces)
            self._part.record_finished(
                FinishedFile(
                    name=file.name,
                    size_bytes=stream.size,
                    crc32=stream.crc32,
                    read_back=read_back,
                )
            )


def _readback_error(path: Path, pieces: Sequence[tuple[str, int, int, int]]) -> CheckpointError:
    wrong = [
        name
        for name, start, length, crc32 in pieces
        if crc32_of_file(path, start=start, length=length) != crc32
    ]
    return CheckpointError(
        f"the disk returned different bytes than were written to `{path}`",
        why=f"the checksum of `{wrong[0]}` differs from before it was written"
        if wrong
        else "the bytes between its tensors differ",
        fix="check the disk (`dmesg | tail`), or write to another one",
    )


def ranges_within(sizes: Iterable[int], *, limit: int) -> Iterator[range]:
    """Yield ranges of consecutive indices whose sizes sum to at most `limit`; an index with a
    larger size has a range of its own."""
    start, total, count = 0, 0, 0
    for number, size in enumerate(sizes):
        count = number + 1
        if number > start and total + size > limit:
            yield range(start, number)
            start, total = number, 0
        total += size
    if count > start:
        yield range(start, count)
