"""Handles standard streams of a process that may outlive its terminal: closed streams, readers that
disappear, and readers that stop reading. `output` prints through them."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import TextIO


class ReaderGone(Exception):
    """Reports that nobody reads standard output any more."""


def open_standard_streams() -> bool:
    """Open standard streams that the caller has closed (`miles models >&-`) on /dev/null. Otherwise
    the next file that is opened would get that number, and be written to by mistake. Returns True
    if standard output was open."""
    is_heard = sys.stdout is not None
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
    return is_heard


def print_nothing_more() -> None:
    """Discard what is left in the buffer of standard output, which Python would try at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def outlive_readers(*, ignored: tuple[int, ...], patience_s: float | None) -> None:
    """Replace standard output and standard error by streams made by `until_closed`."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if getattr(stream, "name", "") == f"<{name}>":  # a caller in Python may have its own
            made = until_closed(stream, number, ignored=ignored, patience_s=patience_s)
            setattr(sys, name, made)


def until_closed(
    stream: TextIO,
    number: int,
    *,
    ignored: tuple[int, ...] = (errno.EIO,),
    patience_s: float | None = None,
) -> TextIO:
    """Return the stream, with errors of these numbers ignored. If nobody reads for `patience_s`,
    further output is dropped until somebody reads again; a message then says how much is missing.
    `patience_s` None: writing waits without limit."""
    raw = _Output(number, "w", closefd=False)
    raw.ignored, raw.patience_s = ignored, patience_s
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
        write_through=stream.name == "<stderr>",
    )


class _Output(io.FileIO):
    """Writes to a standard stream, and discards output when one of the `ignored` errors happens."""

    ignored: tuple[int, ...] = ()
    patience_s: float | None = None
    _num_dropped = 0
    """Bytes dropped since somebody last read."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Return the number of bytes that were written or discarded."""
        view = memoryview(data).cast("B")
        try:
            return super().write(view) if self.patience_s is None else self._write_pieces(view)
        except OSError as error:
            if error.errno == errno.EPIPE and error.errno not in self.ignored:
                raise ReaderGone from None  # typer would end with 1 where it sees EPIPE itself
            if error.errno not in self.ignored:
                raise
            return len(view)

    def _write_pieces(self, data: memoryview) -> int:
        """Write in pieces of PIPE_BUF bytes, which a writable pipe takes without blocking."""
        if self._num_dropped and self._is_writable():
            gap = f"\n[{self._num_dropped} bytes were not shown: nobody read them]\n"
            self._num_dropped = 0
            super().write(gap.encode())
        for begin in range(0, len(data), select.PIPE_BUF):
            if not self._is_writable():
                self._num_dropped += len(data) - begin
                break
            super().write(data[begin : begin + select.PIPE_BUF])
        return len(data)

    def _is_writable(self) -> bool:
        """Return True if the stream is writable; wait for it unless bytes are being dropped."""
        assert self.patience_s is not None
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        return bool(poll.poll(0 if self._num_dropped else 1000 * self.patience_s))
