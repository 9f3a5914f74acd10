"""Writes files for people and trackers that a run does not need itself: events, metrics, samples.
If the disk is full, the run continues and warns once. Checkpoints are written by `saving`."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from milescli.checkpoint.integrity import free_bytes
from milescli.core.events import EventBus, Notice
from milescli.core.units import format_bytes


class SideFiles:
    """Writes files that a run can do without: if the disk fails, it warns the user once. Belongs to
    one attempt."""

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus
        self._warned = set[str]()

    def write(self, path: Path, text: str) -> None:
        """Write a file atomically."""
        with self.writing(path):
            try:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
            except OSError:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                raise

    def warn_once(self, text: str) -> None:
        """Emit a warning, unless the same text was emitted before."""
        if text not in self._warned:
            self._warned.add(text)
            self._bus.emit(Notice(text=text, level="warning"))

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Ignore a failure to write `path` within the context, with one warning for each folder."""
        try:
            yield
        except OSError as error:
            if (place := str(path.parent)) not in self._warned:
                self._warned.add(place)
                free = format_bytes(free_bytes(path.parent))
                self._bus.emit(
                    Notice(
                        text=f"{path} cannot be written ({type(error).__name__}: {error}); "
                        f"{free} are free there. The run continues without it, and without "
                        "other such files that cannot be written",
                        level="warning",
                    )
                )


class LineFile:
    """Appends lines to a file, each at once. An incomplete line, left by a full disk or a killed
    writer, does not corrupt the lines after it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self.os_write = os.write
        size = os.fstat(self._file).st_size
        self._is_torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def write(self, line: str) -> None:
        """Append a line. Raises OSError if the disk does not take all of it."""
        data = (b"\n" if self._is_torn else b"") + line.encode() + b"\n"
        count = self.os_write(self._file, data)
        if count:
            self._is_torn = count < len(data)
        if count < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
