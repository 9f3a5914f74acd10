"""JSONL: one pass checks each line and notes where it begins; rows are read again from there. At
most one line and one chunk of the file are in memory."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import orjson

from milescli.core.files import sha256_of
from milescli.data.tables.base import MAX_LINE_BYTES, Record, Stamp

CHUNK_BYTES = 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
TOO_LONG = f"longer than {MAX_LINE_BYTES // 2**20} MiB"
_EXACT_BOUND = float(2**53)


class JsonLinesTable:
    """See `Table`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = Stamp(path)
        self._starts = array("q")
        """[num_rows + 1] where each line begins, and where the last one ends."""
        self._sha256: str | None = None
        self._num_read = 0
        """Bytes."""

    def records(self) -> Iterator[Record]:
        """See `Table`. Blank lines at the end are no rows."""
        starts, digest = array("q"), hashlib.sha256()
        number, num_blank, end, self._num_read = 0, 0, 0, 0

        def take_in(chunk: bytes) -> None:
            digest.update(chunk)
            self._num_read += len(chunk)

        with self.path.open("rb", buffering=0) as file:
            for start, line in read_lines(file, take_in):
                if line is not None and (not line or line.isspace()):
                    num_blank += 1
                    continue
                for _ in range(num_blank):
                    number += 1
                    starts.append(start)
                    yield number, "an empty line"
                num_blank = 0
                number += 1
                starts.append(start)
                yield number, TOO_LONG if line is None else parse_line(line)
                end = start + (0 if line is None else len(line))
        starts.append(end)
        self._stamp.require_same()
        self._starts, self._sha256 = starts, digest.hexdigest()

    def keep(self, columns: Sequence[str], *, folder: Path) -> None:
        """Nothing is to be done: lines are read where they lie."""

    def fetch(self, places: Sequence[int]) -> list[Record]:
        """See `Table`."""
        self._stamp.require_same()
        records: list[Record] = []
        with self.path.open("rb", buffering=0) as file:
            for place in places:
                start, end = self._starts[place], self._starts[place + 1]
                file.seek(start)
                records.append((place + 1, parse_line(file.read(end - start).rstrip())))
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


def read_lines(
    file: IO[bytes], take_in: Callable[[bytes], object]
) -> Iterator[tuple[int, bytes | None]]:
    """(where it begins, the line without its end); None in the place of one that is longer than
    MAX_LINE_BYTES. A byte order mark at the start is left out. `take_in` gets all bytes."""
    chunk = file.read(CHUNK_BYTES)
    take_in(chunk)
    start, num_cut, rest = len(chunk) - len(chunk.removeprefix(BYTE_ORDER_MARK)), 0, b""
    chunk = chunk[start:]
    while chunk:
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        for line in lines:
            yield start, None if num_cut or len(line) > MAX_LINE_BYTES else line
            start += num_cut + len(line) + 1
            num_cut = 0
        if num_cut or len(rest) > MAX_LINE_BYTES:
            num_cut += len(rest)
            rest = b""
        chunk = file.read(CHUNK_BYTES)
        take_in(chunk)
    if rest or num_cut:
        yield start, None if num_cut else rest


def parse_line(line: bytes) -> dict[str, object] | str:
    """The object that a line holds, or why there is none."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return _parse_slowly(line)
    if not isinstance(value, dict):
        return f"a JSON object is wanted, not {kind_of(value)}"
    count = line.count
    for name, item in value.items():
        if count(_quoted[name]) > 1 or (type(item) is float and abs(item) >= _EXACT_BOUND):
            return _parse_slowly(line)
    return value


class _Quoted(dict[str, bytes]):
    """Names of columns as a line has them."""

    def __missing__(self, name: str) -> bytes:
        if len(self) > 1000:  # whose names are as many as its rows
            self.clear()
        quoted = self[name] = b'"' + name.encode() + b'"'
        return quoted


_quoted = _Quoted()


def _parse_slowly(line: bytes) -> dict[str, object] | str:
    """As Python's own parser has it: NaN and whole numbers of any size are values, errors have a
    place, and a name that is there twice is seen."""
    outermost: list[tuple[str, object]] = []

    def as_dict(pairs: list[tuple[str, object]]) -> dict[str, object]:
        outermost[:] = pairs  # the last one that is closed
        return dict(pairs)

    try:
        value = json.loads(line.decode("utf-8"), object_pairs_hook=as_dict)
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte {error.start + 1} of the line)"
    except json.JSONDecodeError as error:
        if b"\0" in line:
            return f"not JSON (a NUL byte, byte {line.index(0) + 1} of the line)"
        return f"not JSON ({error.msg} at character {error.pos + 1})"
    except ValueError as error:  # a whole number of thousands of digits
        return f"not JSON ({str(error).partition(';')[0]})"
    except RecursionError:
        return "JSON nested too deeply"
    if not isinstance(value, dict):
        return f"a JSON object is wanted, not {kind_of(value)}"
    if len(value) < len(outermost):
        names = [name for name, _ in outermost]
        twice = next(name for name in names if names.count(name) > 1)
        return f"`{twice}` is there twice, and one of the two would be lost"
    return value


def kind_of(value: object) -> str:
    """A value of JSON in words."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
