"""Reads files for the page: converts names in a URL to files within a run folder and nowhere else,
reads long text files by an index of their lines, and sends the page's own files."""

from __future__ import annotations

import os
import shlex
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from milescli.web.responses import Forbidden, NotFound


def below(folder: Path, name: str) -> Path:
    """Return the path of `name`, such as `a/b`, below a folder. Raises Forbidden for one that
    leaves it."""
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise _elsewhere(name)
    return folder.joinpath(*parts)


def file_within(folder: Path, name: str) -> Path:
    """Return a regular file below a folder, with links resolved. Raises NotFound if there is none,
    Forbidden if it is elsewhere or not ours to read."""
    try:
        root, file = folder.resolve(), below(folder, name).resolve()
        if root not in file.parents:
            raise _elsewhere(name)
        if not file.is_file():
            raise NotFound(
                f"there is no file `{name[:200]}`",
                why=f"it is not in {folder}",
                fix=f"ls {shlex.quote(str(folder))}   # list its files",
            )
    except (OSError, RuntimeError) as error:  # a link to itself, a name too long, not ours
        raise Forbidden(
            f"`{name[:200]}` cannot be read",
            why=f"{type(error).__name__}: {error}",
            fix=f"ls -l {shlex.quote(str(folder))}",
        ) from None
    return file


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Raise Forbidden if reading the file fails within the context."""
    try:
        yield
    except OSError as error:
        raise Forbidden(
            f"{file} cannot be read",
            why=f"{type(error).__name__}: {error}",
            fix=f"ls -l {shlex.quote(str(file))}   # check its owner",
        ) from None


def _elsewhere(name: str) -> Forbidden:
    return Forbidden(
        f"`{name[:200]}` is not in the run's folder",
        why="the page reads what is within a run's folder, links resolved",
        fix="ask for a file that the page lists",
    )


BLOCK_BYTES = 2**20
LONGEST_BYTES = 16 * 2**20
"""Approximate limit in bytes on what is kept in memory of a line without end."""
COUNT_S = 2.0
"""Longest time in seconds that one request counts lines; the next one continues from there."""
MAX_CACHED = 64
"""Number of files whose counts are kept; the least recently used one is dropped first."""


@dataclass(slots=True)
class LineIndex:
    """Indexes the lines of one file."""

    file: Path
    inode: int = -1
    size_bytes: int = 0
    """Bytes that were counted so far."""
    newlines: list[int] = field(default_factory=lambda: [0])
    """[blocks + 1] newlines before each block."""
    is_whole: bool = True
    """True if the whole file was counted."""
    ends_line: bool = True
    """True if the last byte is a newline, or the file is empty."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_lines(self) -> int:
        """Return the number of lines counted so far, including an unfinished last one."""
        return self.newlines[-1] + (not self.ends_line)

    def count(self) -> None:
        """Count the new lines, for at most COUNT_S. Raises OSError."""
        until = time.monotonic() + COUNT_S
        with open(self.file, "rb") as opened:
            status = os.fstat(opened.fileno())
            if status.st_ino != self.inode or status.st_size < self.size_bytes:
                self.inode, self.size_bytes, self.newlines = status.st_ino, 0, [0]
                self.ends_line = True
            if self.size_bytes == status.st_size:
                self.is_whole = True
                return
            # the last block may have been half a one
            full = self.size_bytes // BLOCK_BYTES
            del self.newlines[full + 1 :]
            self.size_bytes = full * BLOCK_BYTES
            opened.seek(self.size_bytes)
            self.is_whole = False
            while time.monotonic() < until:
                block = opened.read(BLOCK_BYTES)
                if not block:
                    self.is_whole = True
                    return
                self.newlines.append(self.newlines[-1] + block.count(b"\n"))
                self.size_bytes += len(block)
                self.ends_line = block.endswith(b"\n")

    def lines(self, first: int, limit: int) -> list[bytes]:
        """Return up to `limit` lines from number `first` on, counted from 0, without their
        newlines. Raises OSError."""
        if first >= self.num_lines or limit <= 0:
            return []
        # N newlines stand before line N: the block of the last of them holds its beginning
        block = max(0, bisect_left(self.newlines, first) - 1)
        skip, lines, rest = first - self.newlines[block], list[bytes](), b""
        for data in self.blocks(block):
            if len(rest) >= LONGEST_BYTES:
                data = data[data.find(b"\n") :] if b"\n" in data else b""
            *whole, rest = (rest + data).split(b"\n")
            lines += whole[skip:]
            skip = max(0, skip - len(whole))
            if len(lines) >= limit:
                return lines[:limit]
        return [*lines, rest] if rest and skip == 0 else lines

    def blocks(self, first: int) -> Iterator[bytes]:
        """Yield the counted blocks from number `first` on. Raises OSError."""
        left = self.size_bytes - first * BLOCK_BYTES
        with open(self.file, "rb") as opened:
            opened.seek(first * BLOCK_BYTES)
            while left > 0 and (data := opened.read(min(BLOCK_BYTES, left))):
                left -= len(data)
                yield data

    def blocks_backwards(self) -> Iterator[tuple[int, bytes]]:
        """Yield (newlines before it, block) of what was counted, last first. Raises OSError."""
        with open(self.file, "rb") as opened:
            for block in reversed(range(len(self.newlines) - 1)):
                opened.seek(block * BLOCK_BYTES)
                size = min(BLOCK_BYTES, self.size_bytes - block * BLOCK_BYTES)
                yield self.newlines[block], opened.read(size)


class LineIndexes:
    """Holds the indexes of a server's files."""

    def __init__(self) -> None:
        self._cached = OrderedDict[Path, LineIndex]()
        self._lock = threading.Lock()

    def of(self, file: Path) -> LineIndex:
        """Return the index of a file; a new one has counted nothing yet."""
        with self._lock:
            index = self._cached.get(file)
            if index is None:
                index = self._cached[file] = LineIndex(file)
            self._cached.move_to_end(file)
            while len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
            return index


PACKAGE = Path(__file__).resolve().parents[1]
STATIC = PACKAGE / "web" / "static"
VENDORED = PACKAGE / "vendored"
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
}
"""File suffix -> media type; other files are not sent."""


def static_file(name: str) -> tuple[bytes, str]:
    """Return (content, media type) of a URL below `/static/`. Raises NotFound."""
    folder = VENDORED if name.startswith("vendored/") else STATIC
    file = below(folder, name.removeprefix("vendored/"))  # a link, where a tool installs by links
    if file.suffix not in TYPES or not file.is_file():
        raise NotFound(
            f"there is no page `{name[:200]}`", why="the page has no such file", fix="open /"
        )
    return file.read_bytes(), TYPES[file.suffix]
