"""CSV: a header, then rows of as many fields as it has; text alone. One pass checks each row and
notes where it begins, as for JSONL. A quoted field may hold line breaks."""

from __future__ import annotations

import csv
import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from milescli.core.errors import DataError
from milescli.core.files import sha256_of
from milescli.data.tables.base import MAX_LINE_BYTES, Record, Stamp
from milescli.data.tables.json_lines import TOO_LONG, read_lines


class CsvTable:
    """See `Table`. Rows are named by the line on which they begin; the header is line 1."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = Stamp(path)
        self._starts, self._lines = array("q"), array("q")
        """[num_rows + 1] where each row begins, in bytes; [num_rows] and on which line."""
        self._names: list[str] = []
        self._sha256: str | None = None
        self._num_read = 0
        """Bytes."""

    def records(self) -> Iterator[Record]:
        """See `Table`. Blank lines are no rows."""
        self._starts, self._lines, digest = array("q"), array("q"), hashlib.sha256()
        csv.field_size_limit(MAX_LINE_BYTES)
        self._num_read = 0

        def take_in(chunk: bytes) -> None:
            digest.update(chunk)
            self._num_read += len(chunk)

        with self.path.open("rb", buffering=0) as file:
            lines = _Lines(file, take_in)
            rows = _rows_of(lines)
            self._names = self._header(next(rows, None))
            for start, line, fields in rows:
                self._starts.append(start)
                self._lines.append(line)
                yield line, fields if isinstance(fields, str) else self._named(fields)
            self._starts.append(lines.end)
        self._stamp.require_same()
        self._sha256 = digest.hexdigest()

    def keep(self, columns: Sequence[str], *, folder: Path) -> None:
        """Nothing is to be done: rows are read where they lie."""

    def fetch(self, places: Sequence[int]) -> list[Record]:
        """See `Table`."""
        self._stamp.require_same()
        records: list[Record] = []
        with self.path.open("rb", buffering=0) as file:
            for place in places:
                file.seek(start := self._starts[place])
                text = file.read(self._starts[place + 1] - start).decode("utf-8")
                lines = (line + "\n" for line in text.split("\n"))
                fields = next(csv.reader(lines, strict=True))
                records.append((self._lines[place], self._named(fields)))
        return records

    @property
    def size_bytes(self) -> int:
        """See `Table`."""
        return self.path.stat().st_size

    @property
    def share_read(self) -> float:
        """See `Table`."""
        return min(1.0, self._num_read / max(1, self.size_bytes))

    @property
    def sha256(self) -> str:
        """See `Table`."""
        return self._sha256 or sha256_of(self.path)

    def _header(self, row: tuple[int, int, list[str] | str] | None) -> list[str]:
        if row is None:
            return []
        _, line, names = row
        fault = (
            names
            if isinstance(names, str)
            else "a column has no name"
            if not all(name.strip() for name in names)
            else f"two columns are called {twice}"
            if (twice := next((name for name in names if names.count(name) > 1), None))
            else None
        )
        if fault is not None:
            raise DataError(
                f"the header of {self.path} cannot be used",
                why=f"line {line}: {fault}",
                fix=f"sed -n {line}p {self.path}   # a name for each column, each another",
            )
        assert not isinstance(names, str)
        return names

    def _named(self, fields: list[str]) -> dict[str, object] | str:
        if len(fields) != len(self._names):
            return f"it has {len(fields)} fields, and the header {len(self._names)}"
        return dict(zip(self._names, fields, strict=True))


class _Lines:
    """Lines as text, and where the next one begins. Raises ValueError for what is no text."""

    def __init__(self, file: IO[bytes], take_in: Callable[[bytes], object]) -> None:
        self._lines = read_lines(file, take_in)
        self.end = 0
        """In bytes, behind the last line that was read."""
        self.number = 0
        """Of that line."""

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        start, line = next(self._lines)
        self.number += 1
        if line is None:
            raise ValueError(TOO_LONG)
        self.end = start + len(line) + 1
        try:
            return line.decode("utf-8") + "\n"
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 (byte {error.start + 1} of the line)") from None


def _rows_of(lines: _Lines) -> Iterator[tuple[int, int, list[str] | str]]:
    """(where it begins, its line, its fields or why they cannot be read)."""
    rows = csv.reader(lines, strict=True)
    while True:
        start, line = lines.end, lines.number + 1
        try:
            fields = next(rows)
        except StopIteration:
            return
        except (csv.Error, ValueError) as error:
            rows = csv.reader(lines, strict=True)  # the one that failed is in the middle of a row
            yield start, line, f"not CSV ({error})" if isinstance(error, csv.Error) else str(error)
            continue
        if fields:
            yield start, line, fields
