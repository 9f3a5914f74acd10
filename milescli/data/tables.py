"""Reads data files row by row: JSON lines, CSV, parquet and arrow, chosen by their suffix. Refuses
unreadable files before they are opened. Rows keep their exact values: no type is inferred for a
column."""

from __future__ import annotations

import csv
import difflib
import hashlib
import json
import os
import re
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from milescli.core.errors import DataError
from milescli.core.files import NESTED_TOO_DEEPLY, open_regular, parse_json, sha256_of
from milescli.data.columnar import restorer

if TYPE_CHECKING:
    import pyarrow as pa

Record = tuple[int, dict[str, object] | str]
"""The line (or parquet row), counted from 1, and the row; or why the row could not be read."""

MAX_LINE_BYTES = 16 * 2**20
"""A longer line is a bad row, and is never in memory as a whole."""
CHUNK_BYTES = 2**20
"""Text is read in chunks of this size."""
BATCH_ROWS = 1024
"""Rows of a columnar file that are in memory at once."""
SUFFIXES = (".jsonl", ".parquet", ".csv", ".arrow")
"""The suffix of a file determines its format."""
LINE_SUFFIXES = (".jsonl", ".csv")
"""Text formats, whose rows are named by line."""

TOO_LONG = f"longer than {MAX_LINE_BYTES // 2**20} MiB"
NESTED = f"JSON {NESTED_TOO_DEEPLY}"
_DELIMITERS = (";", "\t", "|")
"""Separators of fields if a header has no comma."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_EXACT_BOUND = float(2**53)
_LONG_NUMBER = b"0" * len(str(2**63))
"""Shorter integers are exact in orjson."""
_DIGITS_AS_ZEROS = bytes(ord("0" if chr(byte) in "0123456789" else " ") for byte in range(256))
"""Table of bytes.translate; a search in what it returns is far faster than a regular expression."""
_TYPO_SIMILARITY = 0.7
"""Similarity (difflib) from which another name counts as a misspelling."""
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
"""First bytes -> what is wrong with a file of any suffix, why, and the command that repairs it."""
_TEXT_HEADS = (
    (b"PAR1", "it is a parquet file", "mv {path} {stem}.parquet"),
    (b"ARROW1", "it is an arrow file", "mv {path} {stem}.arrow"),
    (b"\xff\xfe", "it is UTF-16, and UTF-8 is read", "iconv -f UTF-16 -t UTF-8 {path} > {new}"),
    (b"\xfe\xff", "it is UTF-16, and UTF-8 is read", "iconv -f UTF-16 -t UTF-8 {path} > {new}"),
)
"""First bytes -> why a file is not the text that its suffix states, and the command that repairs
it."""


class Table:
    """Iterates over the rows of one file that `check_file` accepted. Keeps one chunk, or one batch
    of rows, in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.share_read = 0.0
        """Share of the file that `records` has read, 0 to 1. An arrow file does not state its
        number of rows: its share stays 0."""
        self._identity = _identity(path)
        self._sha256: str | None = None

    def records(self) -> Iterator[Record]:
        """Yield all rows in order. Raises DataError if the file as a whole cannot be read, or
        changes meanwhile."""
        self.share_read = 0.0
        if self.path.suffix in (".parquet", ".arrow"):
            yield from self._columnar_rows()
        elif self.path.suffix == ".csv":
            yield from self._csv_rows()
        else:
            yield from self._json_rows()
        self.require_same()

    def require_same(self) -> None:
        """Raise DataError if the file was written or replaced since this table was made."""
        if _identity(self.path) != self._identity:
            raise DataError(
                f"{self.path} changed while miles read it",
                why="its size or modification time differs from when it was opened",
                fix=f"cp {_typed(self.path)} "
                f"{_typed(self.path.with_stem(self.path.stem + '-copy'))}   # then use the copy, "
                "which nobody modifies",
            )

    @property
    def size_bytes(self) -> int:
        """Return the size of the content, uncompressed if the format states it."""
        if self.path.suffix != ".parquet":
            return self.path.stat().st_size
        import pyarrow.parquet as pq

        with self._arrow_errors():
            groups = pq.read_metadata(self.path)
        return sum(groups.row_group(n).total_byte_size for n in range(groups.num_row_groups))

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the file's bytes, 64 hex digits."""
        return self._sha256 or sha256_of(self.path)

    def _lines(self) -> Iterator[bytes | None]:
        """Yield each line without its line break; None in place of one longer than
        MAX_LINE_BYTES."""
        digest, num_read, size = hashlib.sha256(), 0, max(1, self.size_bytes)
        rest, is_long = b"", False
        with self.path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                text = chunk if num_read else chunk.removeprefix(_BYTE_ORDER_MARK)
                num_read += len(chunk)
                self.share_read = min(1.0, num_read / size)
                *lines, rest = (rest + text).split(b"\n")
                for line in lines:
                    yield None if is_long or len(line) > MAX_LINE_BYTES else line
                    is_long = False
                if is_long or len(rest) > MAX_LINE_BYTES:
                    rest, is_long = b"", True
        if rest or is_long:
            yield None if is_long else rest
        self._sha256 = digest.hexdigest()

    def _json_rows(self) -> Iterator[Record]:
        """Yield the rows of JSON lines. Blank lines at the end are not rows."""
        num_blank = 0
        for number, line in enumerate(self._lines(), start=1):
            if line is not None and (not line or line.isspace()):
                num_blank += 1
                continue
            for blank in range(number - num_blank, number):
                yield blank, "an empty line"
            num_blank = 0
            yield number, TOO_LONG if line is None else parse_line(line)

    def _csv_rows(self) -> Iterator[Record]:
        """Yield the rows below the header, named by the line on which they begin. Each has as many
        fields as the header; a quoted field may contain line breaks; blank lines are not rows."""
        csv.field_size_limit(MAX_LINE_BYTES)
        number, names = 0, None

        def decoded(line: bytes | None) -> str:
            nonlocal number
            number += 1
            if line is None:
                raise ValueError(TOO_LONG)
            try:
                return line.decode("utf-8") + "\n"
            except UnicodeDecodeError as error:
                raise ValueError(f"it is not UTF-8 (byte {error.start + 1} of the line)") from None

        raw, heads = self._lines(), list[bytes | None]()
        for head in raw:
            heads.append(head)
            if head is None or head.strip():
                break
        delimiter = _delimiter((heads[-1] if heads else None) or b"")
        lines = map(decoded, chain(heads, raw))
        rows = csv.reader(lines, strict=True, delimiter=delimiter)
        while True:
            first = number + 1
            fields: list[str] | str
            try:
                fields = next(rows)
            except StopIteration:
                return
            except (csv.Error, ValueError) as error:
                # the old reader is in the middle of a row
                rows = csv.reader(lines, strict=True, delimiter=delimiter)
                fields = f"not CSV ({error})" if isinstance(error, csv.Error) else str(error)
            if not fields:
                continue
            if names is None:
                names = self._header(first, fields)
            elif isinstance(fields, str):
                yield first, fields
            elif len(fields) != len(names):
                yield first, f"it has {len(fields)} fields, and the header {len(names)}"
            else:
                yield first, dict(zip(names, fields, strict=True))

    def _header(self, line: int, names: list[str] | str) -> list[str]:
        if isinstance(names, str):
            fault = names
        elif not all(name.strip() for name in names):
            fault = "a column has no name"
        elif twice := next((name for name in names if names.count(name) > 1), None):
            fault = f"two columns are called {twice}"
        else:
            return names
        raise DataError(
            f"the header of {self.path} cannot be used",
            why=f"line {line}: {fault}",
            fix=f"sed -n {line}p {_typed(self.path)}   # give each column a different name",
        )

    def _columnar_rows(self) -> Iterator[Record]:
        """Yield the rows of a parquet or arrow file, named by their number."""
        number = 0
        with self._arrow_errors():
            for batch, num_rows in self._batches():
                names = batch.schema.names
                if twice := next((name for name in names if names.count(name) > 1), None):
                    raise DataError(
                        f"{self.path} cannot be used",
                        why=f"two of its columns have the name {twice}",
                        fix=f"rewrite {self.path} with different names for them",
                    )
                for row in _rows_of(batch):
                    number += 1
                    yield number, row
                self.share_read = min(1.0, number / num_rows) if num_rows else 0.0

    def _batches(self) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield each batch with the number of rows of the file, 0 if the file does not state it."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self.path.suffix == ".parquet":
            with pq.ParquetFile(self.path, memory_map=True) as file:
                for batch in file.iter_batches(BATCH_ROWS):
                    yield batch, file.metadata.num_rows
            return
        with pa.memory_map(str(self.path)) as source:
            try:
                file = pa.ipc.open_file(source)
                batches = (file.get_batch(n) for n in range(file.num_record_batches))
            except pa.ArrowInvalid:  # the stream format, which has no footer
                source.seek(0)
                batches = iter(pa.ipc.open_stream(source))
            for batch in batches:
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    yield batch.slice(start, BATCH_ROWS), 0

    @contextmanager
    def _arrow_errors(self) -> Iterator[None]:
        """Turn exceptions of pyarrow into a DataError that names the file."""
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"cannot read {self.path}",
                why=f"it is not {'a parquet' if self.path.suffix == '.parquet' else 'an arrow'} "
                f"file: {next(iter(str(error).splitlines()), type(error).__name__)}",
                fix=f"head -c 100 {_typed(self.path)}   # what is it?",
            ) from error


def _delimiter(header: bytes) -> str:
    """Return the separator of fields of a CSV file: a comma, or the one in its header if that has
    no comma, as a semicolon in tables from many countries of Europe."""
    names = re.sub(rb'"[^"]*"', b"", header)
    if b"," in names:
        return ","
    return max((",", *_DELIMITERS), key=lambda each: names.count(each.encode()))


def _rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, object]]:
    """Yield the rows of a batch, with the values that their writer had."""
    restorers = [restorer(column) for column in batch.columns]
    if not any(restorers):
        yield from batch.to_pylist()
        return
    columns = [
        column.to_pylist() if restore is None else map(restore, column.to_pylist())
        for column, restore in zip(batch.columns, restorers, strict=True)
    ]
    names = batch.schema.names
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def parse_line(line: bytes) -> dict[str, object] | str:
    """Return the object of a JSON line, or why there is none."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return _parse_slowly(line)
    if not isinstance(value, dict):
        return f"a row must be a JSON object, not {kind_of(value)}"
    count, is_nested = line.count, False
    for name, item in value.items():
        if count(_quoted[name]) > 1 or (type(item) is float and abs(item) >= _EXACT_BOUND):
            return _parse_slowly(line)
        is_nested = is_nested or type(item) in (dict, list)
    if is_nested and _LONG_NUMBER in line.translate(_DIGITS_AS_ZEROS):
        return _parse_slowly(line)  # orjson would round an integer within the list or object
    return value


class _Quoted(dict[str, bytes]):
    """Maps names of columns to bytes in quotation marks, made on first use."""

    def __missing__(self, name: str) -> bytes:
        if len(self) > 1000:  # whose names are as many as its rows
            self.clear()
        quoted = self[name] = b'"' + name.encode() + b'"'
        return quoted


_quoted = _Quoted()


def _parse_slowly(line: bytes) -> dict[str, object] | str:
    """Parse a line with Python's own parser: NaN and integers of any size are values, errors have a
    position, and a repeated name is noticed."""
    outermost: list[tuple[str, object]] = []

    def as_dict(pairs: list[tuple[str, object]]) -> dict[str, object]:
        outermost[:] = pairs  # the last one that is closed
        return dict(pairs)

    try:
        value = parse_json(line.decode("utf-8"), object_pairs_hook=as_dict)
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte {error.start + 1} of the line)"
    except json.JSONDecodeError as error:
        if b"\0" in line:
            return f"not JSON (a NUL byte, byte {line.index(0) + 1} of the line)"
        if error.msg == NESTED_TOO_DEEPLY:
            return NESTED
        where = f" at character {error.pos + 1}" if error.doc else ""
        return f"not JSON ({error.msg}{where})"
    if not isinstance(value, dict):
        return f"a row must be a JSON object, not {kind_of(value)}"
    if len(value) < len(outermost):
        names = [name for name, _ in outermost]
        twice = next(name for name in names if names.count(name) > 1)
        return f"`{twice}` is there twice, and one of the two would be lost"
    return value


def kind_of(value: object) -> str:
    """Name the type of a JSON value."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        type(None): "null",
        bytes: "binary",
    }
    return names.get(type(value), type(value).__name__)


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns, state.st_ino


def check_file(path: Path, *, field: str) -> None:
    """Raise DataError if `path` is not a data file that can be opened. Reads only its first bytes,
    and none of a pipe or device. `field`: key below `data` that named it."""
    _check_kind(path, field=field)
    head = _head(path)
    for first, what, why, fix in _HEADS:
        if head.startswith(first):
            raise DataError(f"{path} {what}", why=why, fix=fix.format(path=_typed(path)))
    if path.suffix not in SUFFIXES:
        raise _unknown_format_error(path, head)
    if path.suffix in LINE_SUFFIXES:
        form = path.suffix[1:].upper()
        new = path.with_stem(path.stem + "-utf8")
        for first, why, fix in _TEXT_HEADS:
            if head.startswith(first):
                stem = _typed(path.with_suffix(""))
                mend = fix.format(path=_typed(path), stem=stem, new=_typed(new))
                raise DataError(f"{path} is not {form}", why=why, fix=mend)


def _check_kind(path: Path, *, field: str) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise _missing_file_error(path, field=field) from None
    except OSError as error:
        raise _unreadable_error(path, error) from error
    if stat.S_ISDIR(mode):
        raise _folder_error(path, field=field)
    if special := _SPECIAL_FILES.get(stat.S_IFMT(mode)):
        raise DataError(
            f"{path} is {special}",
            why="miles reads the rows more than once, but this file can only be read once or "
            "never ends",
            fix=f"head -n 1000 {_typed(path)} > FILE.jsonl   # then --set data.{field}=FILE.jsonl",
        )


MAX_SHARDS = 32
"""Most shards that an error names."""


def _folder_error(path: Path, *, field: str) -> DataError:
    """Return the error for a folder in place of a file. Its fix names a file in it, or in one of
    its folders; for a data set in shards, all of them."""
    folders = [path, *sorted(item for item in path.iterdir() if item.is_dir())]
    found = next(
        (files for folder in folders if (files := _files_in(folder))), [path / "FILE.jsonl"]
    )
    shards = [file for file in found if "-of-" in file.name]
    named = f"{field}={found[0]}"
    if 1 < len(shards) <= MAX_SHARDS:
        named = f"{field}=[{', '.join(map(str, shards))}]"
    return DataError(
        f"{path} is a folder",
        why=f"name a file or a list of files; {len(found)} in this folder can be read",
        fix=f"--set {shlex.quote(f'data.{named}')}",
    )


def _files_in(folder: Path) -> list[Path]:
    """Return the readable files, except for caches of `datasets`."""
    files = (file for file in folder.iterdir() if file.suffix in SUFFIXES)
    return sorted(file for file in files if not file.name.startswith("cache-"))


def _missing_file_error(path: Path, *, field: str) -> DataError:
    if path.is_symlink():
        return DataError(
            f"there is no file {path}",
            why=f"it is a symbolic link to {os.readlink(path)}, which does not exist",
            fix=f"ls -l {_typed(path)}",
        )
    folder = path.parent
    if not folder.is_dir():
        there = next(parent for parent in folder.parents if parent.is_dir())
        return DataError(
            f"there is no file {path}",
            why=f"there is no folder {folder}",
            fix=f"ls {_typed(there)}",
        )
    siblings = sorted(item.name for item in folder.iterdir())
    readable = {Path(name).stem: name for name in siblings if name.endswith(SUFFIXES)}
    guesses = difflib.get_close_matches(path.stem, readable, n=1, cutoff=_TYPO_SIMILARITY)
    return DataError(
        f"there is no file {path}",
        why=f"{folder} contains {', '.join(siblings[:8]) or 'nothing'}",
        fix=f"--set {shlex.quote(f'data.{field}={folder / readable[guesses[0]]}')}"
        if guesses
        else f"ls {_typed(folder)}",
    )


def _unknown_format_error(path: Path, head: bytes) -> DataError:
    """Return the error for another suffix. `head`: the first bytes of the file."""
    known, suffix = f"{', '.join(SUFFIXES[:-1])} nor {SUFFIXES[-1]}", path.suffix.lower()
    if suffix == ".json":
        rows = "." if head.removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] == b"{" else "'.[]'"
        fix = f"jq -c {rows} {_typed(path)} > {_typed(path.with_suffix('.jsonl'))}"
    else:
        new = suffix if suffix in SUFFIXES else ".csv" if suffix == ".tsv" else ".jsonl"
        fix = f"mv {_typed(path)} {_typed(path.with_suffix(new))}"
    return DataError(
        f"{path} is neither {known}",
        why=f"its suffix is {path.suffix or 'missing'}, and miles recognises the format by the "
        "suffix",
        fix=fix,
    )


def _head(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(6)
    except OSError as error:
        raise _unreadable_error(path, error) from error


def _unreadable_error(path: Path, error: OSError) -> DataError:
    why = str(error.strerror or error)
    return DataError(f"cannot open {path}", why=why, fix=f"ls -l {_typed(path)}")


def _typed(path: Path) -> str:
    """Return a path as it is typed in a shell."""
    return shlex.quote(str(path))
