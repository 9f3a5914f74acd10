"""Packs messages between two processes into frames of a pipe, and writes them through an outbox
that never blocks its user. Standard library only; used by both sides.

A message is (number, kind, value): `call`, `cancel`, `ping` and `answer` go to a worker; `ready`,
`value`, `error` and `ask` come back."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import select
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

Message = tuple[int, str, Any]
SIZE = struct.Struct("<Q")
"""Length before each pickled frame."""
_MAX_FRAME_BYTES = 1 << 34
"""A larger length is not a frame, but text that was printed into the pipe."""
_MAX_LINE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Codec:
    """Describes how messages are encoded."""

    pack: Callable[[Any], bytes]
    """Raises if the message cannot be encoded."""
    read: Callable[[BinaryIO], bytes | None]
    """Reads the next frame of a pipe; None at its end. Raises ValueError for anything else."""
    unpack: Callable[[bytes], Any]
    """Returns a message, or a list of them. Raises if the frame is invalid."""


def _pickled(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return SIZE.pack(len(body)) + body


def _read_pickled(pipe: BinaryIO) -> bytes | None:
    head = pipe.read(SIZE.size)
    if not head:
        return None
    size = SIZE.unpack(head)[0] if len(head) == SIZE.size else _MAX_FRAME_BYTES + 1
    if size > _MAX_FRAME_BYTES:
        raise ValueError(repr(head))
    frame = pipe.read(size)
    return frame if len(frame) == size else None


def _read_line(pipe: BinaryIO) -> bytes | None:
    line = pipe.readline(_MAX_LINE_BYTES)
    if not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:
        return None  # torn, or nothing
    return line


def _from_json(line: bytes) -> Message:
    try:
        number, kind, value = json.loads(line)
        if not isinstance(number, int):
            raise TypeError("it has no number")
    except (ValueError, TypeError) as fault:
        raise ValueError(f"{line[:80]!r} ({fault})") from None
    return number, kind, value


PICKLE = Codec(_pickled, _read_pickled, pickle.loads)
"""A length and a pickle: for processes of our own."""
JSON = Codec(lambda message: json.dumps(message).encode() + b"\n", _read_line, _from_json)
"""A line of JSON: for processes that run code of others, from which no pickle is read."""


class Outbox:
    """Writes frames in the order in which they are put: at once if the pipe has room, and by a
    thread if it has none. Any thread may put a frame."""

    def __init__(self, pack: Callable[[Any], bytes]) -> None:
        self._pack = pack
        self._lock = threading.Lock()
        self._late: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._num_late = 0
        """Number of frames that the thread has yet to write."""
        self._pipe = -1
        """None while the pipe is not open, or no longer."""

    def put(self, message: Any) -> None:
        """Send a message. If the other end is closed, do nothing: the reader of that end reports
        it. Raises what `pack` raises if the message cannot be packed."""
        data = self._pack(message)
        with self._lock:
            if self._pipe >= 0 and not self._num_late:
                data = data[self._write_now(data) :]
                if not data:
                    return
            self._num_late += 1
            self._late.put(data)  # locked: the rest of a frame comes before the next frame

    def end(self) -> None:
        """Close the pipe after everything that was put is written."""
        self._late.put(None)

    def run(self, pipe: int) -> None:
        """Write until `end`, in a thread of its own; then close the pipe."""
        os.set_blocking(pipe, False)
        with self._lock:
            self._pipe = pipe
        with contextlib.suppress(OSError):  # it has ended: its reader says so
            while (data := self._late.get()) is not None:
                self._write_all(pipe, data)
                with self._lock:
                    self._num_late -= 1
        with self._lock:
            self._pipe = -1
        os.close(pipe)

    def _write_now(self, data: bytes) -> int:
        """Write as much as the pipe has room for; return the number of bytes."""
        try:
            return os.write(self._pipe, data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    @staticmethod
    def _write_all(pipe: int, data: bytes) -> None:
        poll = select.poll()
        poll.register(pipe, select.POLLOUT)
        view = memoryview(data)
        while view:
            poll.poll()
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(pipe, view) :]
