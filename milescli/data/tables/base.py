"""The interface of a data file: iterates over its records in order, reads single rows by index, and
refuses unreadable files before they are opened. Independent of formats and columns."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from milescli.core.errors import DataError, nearest

Record = tuple[int, dict[str, object] | str]
"""Line (or parquet row) counted from 1, and the row; or why it could not be read."""

MAX_LINE_BYTES = 16 * 2**20
"""A longer line is a bad row, and is never in memory whole."""

SUFFIXES = (".jsonl", ".parquet", ".csv", ".arrow")
"""By which a format is known."""
LINE_SUFFIXES = (".jsonl", ".csv")
"""Formats that are text, whose rows are named by line."""

_SPECIAL_FILES = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device file",
    stat.S_IFBLK: "a device file",
}
_HEADS = (
    (b"\x1f\x8b", "is compressed", "it is a gzip file", "gunzip -k {path}"),
    (b"PK\x03\x04", "is compressed", "it is a zip file", "unzip {path}"),
    (b"\x28\xb5\x2f\xfd", "is compressed", "it is a zstd file", "unzstd {path}"),
    (b"BZh", "is compressed", "it is a bzip2 file", "bunzip2 -k {path}"),
    (b"\xfd7zX", "is compressed", "it is an xz file", "unxz -k {path}"),
)
"""First bytes -> what is wrong with a file of any suffix, why, and what mends it."""
_TEXT_HEADS = (
    (b"PAR1", "it is a parquet file", "mv {path} {stem}.parquet"),
    (b"ARROW1", "it is an arrow file", "mv {path} {stem}.arrow"),
    (b"\xff\xfe", "it is UTF-16, and UTF-8 is read", "iconv -f UTF-16 -t UTF-8 {path} > {new}"),
    (b"\xfe\xff", "it is UTF-16, and UTF-8 is read", "iconv -f UTF-16 -t UTF-8 {path} > {new}"),
)
"""First bytes -> why a file is not the text that its suffix says, and what mends it."""


class Table(Protocol):
    """The rows of one file."""

    path: Path

    def records(self) -> Iterator[Record]:
        """All rows in order. To be run to its end before rows are fetched. Raises DataError where
        the file as a whole cannot be read, or changes meanwhile."""
        ...

    def keep(self, columns: Sequence[str], *, folder: Path) -> None:
        """Make ready to fetch single rows of these columns; what that needs on the disk goes to
        `folder` and is gone when the process ends."""
        ...

    def fetch(self, places: Sequence[int]) -> list[Record]:
        """Single rows by their places, counted from 0, after `keep`. Raises DataError where the
        file has changed since."""
        ...

    @property
    def size_bytes(self) -> int:
        """Size of the content, uncompressed as far as that is known."""
        ...

    @property
    def share_read(self) -> float:
        """Share of the file that `records` has read: 0 to 1."""
        ...

    @property
    def sha256(self) -> str:
        """SHA-256 of the file's bytes, 64 hex digits."""
        ...


class Stamp:
    """Whether a file is still the one that was opened: by its size, its inode and the time of its
    last change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = _identity(path)

    def require_same(self) -> None:
        """Raises DataError where the file was written to or replaced."""
        if _identity(self._path) != self._seen:
            raise DataError(
                f"{self._path} changed while it was read",
                why="its size or its time of change is another than when it was opened",
                fix=f"cp {self._path} {self._path.with_stem(self._path.stem + '-copy')}   # then "
                "name the copy, which nobody writes to",
            )


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns, state.st_ino


def check_file(path: Path, *, field: str) -> None:
    """Raises DataError where `path` is no data file that can be opened. Reads its first bytes
    alone, and those of no pipe or device. `field`: the key below `data` that named it."""
    _check_kind(path, field=field)
    head = _head(path)
    for first, what, why, fix in _HEADS:
        if head.startswith(first):
            raise DataError(f"{path} {what}", why=why, fix=fix.format(path=path))
    if path.suffix not in SUFFIXES:
        raise _unknown_format(path)
    if path.suffix in LINE_SUFFIXES:
        form = path.suffix[1:].upper()
        new = path.with_stem(path.stem + "-utf8")
        for first, why, fix in _TEXT_HEADS:
            if head.startswith(first):
                mend = fix.format(path=path, stem=path.with_suffix(""), new=new)
                raise DataError(f"{path} is not {form}", why=why, fix=mend)


def _check_kind(path: Path, *, field: str) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise _missing(path, field=field) from None
    except OSError as error:
        raise _unreadable(path, error) from error
    if stat.S_ISDIR(mode):
        inside = sorted(item.name for item in path.iterdir() if item.suffix in SUFFIXES)
        guess = path / (inside[0] if inside else "FILE.jsonl")
        raise DataError(
            f"{path} is a folder", why="a single file is wanted", fix=f"--set data.{field}={guess}"
        )
    if special := _SPECIAL_FILES.get(stat.S_IFMT(mode)):
        raise DataError(
            f"{path} is {special}",
            why="rows are read more than once, and it gives its bytes once, or without end",
            fix=f"head -n 1000 {path} > FILE.jsonl   # then --set data.{field}=FILE.jsonl",
        )


def _missing(path: Path, *, field: str) -> DataError:
    if path.is_symlink():
        return DataError(
            f"there is no file {path}",
            why=f"it is a symbolic link to {os.readlink(path)}, which does not exist",
            fix=f"ls -l {path}",
        )
    siblings = sorted(item.name for item in path.parent.iterdir()) if path.parent.is_dir() else []
    guess = nearest(path.name, siblings)
    where = (
        f"{path.parent} holds {', '.join(siblings[:8]) or 'nothing'}"
        if path.parent.is_dir()
        else f"there is no folder {path.parent}"
    )
    return DataError(
        f"there is no file {path}",
        why=where,
        fix=f"--set data.{field}={path.parent / (guess or 'FILE.jsonl')}",
    )


def _unknown_format(path: Path) -> DataError:
    known = f"{', '.join(SUFFIXES[:-1])} nor {SUFFIXES[-1]}"
    return DataError(
        f"{path} is neither {known}",
        why=f"its suffix is {path.suffix or 'missing'}, and the format is known by it",
        fix=f"jq -c '.[]' {path} > {path.with_suffix('.jsonl')}"
        if path.suffix == ".json"
        else f"mv {path} {path.with_suffix('.jsonl')}",
    )


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(6)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"cannot open {path}", why=str(error.strerror or error), fix=f"ls -l {path}")
