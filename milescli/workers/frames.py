"""The way to another process: what is put there is written at once where the pipe has room, and by
a thread where it has none, so that nobody waits for whatever reads it. Used by `user_process`."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import struct
import threading
from typing import Any

SIZE = struct.Struct("<Q")
"""Before each frame."""


class Outbox:
    """Frames in the order in which they are put. Any thread may put one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._late: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._num_late = 0
        """Put, and not yet written by the thread."""
        self._pipe = -1
        """Not open yet, or no more."""

    def put(self, frame: Any) -> None:
        """Anything that can be pickled. Where the other end is gone, nothing happens: who reads
        from there says so."""
        body = pickle.dumps(frame, protocol=pickle.HIGHEST_PROTOCOL)
        data = SIZE.pack(len(body)) + body
        with self._lock:
            if self._pipe >= 0 and not self._num_late:
                data = data[self._written(data) :]
                if not data:
                    return
            self._num_late += 1
        self._late.put(data)

    def end(self) -> None:
        """The pipe is closed behind what was put."""
        self._late.put(None)

    def run(self, pipe: int) -> None:
        """In a thread of its own, until `end`. The pipe is closed then."""
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

    def _written(self, data: bytes) -> int:
        """How much of it; nothing where the pipe is full."""
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
