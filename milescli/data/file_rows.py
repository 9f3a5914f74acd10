"""Reads each data file once: checks its rows, and writes the good ones to a memory-mapped Arrow
file, from which they are read in any order."""

from __future__ import annotations

import errno
import mmap
import pickle
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from milescli.core.errors import DataError
from milescli.core.types import Prompt
from milescli.data.rows import BadRow, Parsed, PathField, bad_rows_error
from milescli.data.tables import NESTED, Table
from milescli.recipe.data_files import DataFile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_BAD_ROWS = 1000
"""Bad rows that are stored for messages; further ones are only counted."""
TICK_ROWS = 4096
"""Rows between two reports of progress."""
BATCH_ROWS = 4096
BATCH_BYTES = 4 * 2**20
"""Rows, or bytes of rows, that are written to Arrow at once."""


class RowParser(Protocol):
    """Finds the columns of a file and parses its rows, for one source."""

    row_class: ClassVar[type[NamedTuple]]
    field: PathField
    """Key below `data` that names the file."""

    def find(self, record: Mapping[str, Any], path: Path) -> Any:
        """Find the columns by the first row. Raises DataError."""

    def parse(self, record: Mapping[str, Any], line: int, columns: Any) -> Parsed:
        """Return the row on `line`. Raises ValueError with the reason if it cannot be used, and
        DataError if that holds for the whole file."""


class ArrowRows:
    """Stores rows in an unnamed Arrow file, which disappears when the process ends. The columns are
    the two hashes of each row, and the row itself, pickled: Arrow's own types would change values,
    e.g. set a key that one row lacks to null."""

    def __init__(self, folder: Path | None) -> None:
        """Start to write a file in `folder`; None: in the folder for temporary files."""
        import pyarrow as pa

        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, `finish` closes it
        self._schema = pa.schema({"key": pa.int64(), "label": pa.int64(), "row": pa.binary()})
        self._writer = pa.ipc.new_file(self._file, self._schema)
        self._keys, self._labels, self._rows = array("q"), array("q"), list[bytes]()
        """The rows that wait to be written."""
        self._waiting_bytes = 0
        self._table: Any = None

    def add(self, packed: bytes, *, key_hash: int, label_hash: int) -> None:
        """Append a pickled row."""
        self._keys.append(key_hash)
        self._labels.append(label_hash)
        self._rows.append(packed)
        self._waiting_bytes += len(packed)
        if len(self._rows) >= BATCH_ROWS or self._waiting_bytes >= BATCH_BYTES:
            self._write()

    def finish(self) -> None:
        """Write the buffered rows and map the file, so that rows can be read."""
        import pyarrow as pa

        self._write()
        self._writer.close()
        self._file.flush()
        with self._file:
            # private: some network file systems do not share pages
            mapped = mmap.mmap(self._file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        self._table = pa.ipc.open_file(pa.py_buffer(mapped)).read_all()

    def read(self, places: Sequence[int]) -> list[tuple[Any, ...]]:
        """Return rows by their places among all good rows."""
        rows = self._table["row"]
        return [pickle.loads(rows[place].as_py()) for place in places]

    def hashes(self, column: str) -> NDArray[np.int64]:
        """Return [num_rows] the hashes in the column `key` or `label`."""
        return self._table[column].to_numpy()

    def _write(self) -> None:
        """Write a batch. Its arrays are built from buffers, as `pyarrow.array` would import
        pandas."""
        import pyarrow as pa

        ends = array("i", accumulate(map(len, self._rows), initial=0))
        buffers = [[self._keys], [self._labels], [ends, b"".join(self._rows)]]
        columns = [
            pa.Array.from_buffers(column.type, len(self._rows), [None, *map(pa.py_buffer, parts)])
            for column, parts in zip(self._schema, buffers, strict=True)
        ]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        self._keys, self._labels, self._rows = array("q"), array("q"), []
        self._waiting_bytes = 0


@dataclass(slots=True, kw_only=True)
class FileRows:
    """Holds the rows that a source uses of one file, after one pass over the file."""

    table: Table
    form: RowParser
    spelled: str
    """The file in the recipe's form: its path, and which rows."""
    rows: ArrowRows
    """The good rows."""
    columns: Any = None
    """The columns that the form found; None if no row could be read."""
    first: dict[str, object] = field(default_factory=dict)
    """The first row that could be read."""
    num_rows: int = 0
    last_line: int = 0
    """Line of the last row, counted from 1."""
    num_demonstrations: int = 0
    num_bad: int = 0
    bad: list[BadRow] = field(default_factory=list)
    """The first bad rows."""
    first_index: int = 0
    """Added to the index of each row, so that rows of several files have different indices."""
    source: str | None = None
    """The entry of `data.mix` that named the file."""

    @property
    def path(self) -> Path:
        """Return the path of the file."""
        return self.table.path

    @property
    def part(self) -> str:
        """Return which rows are used, as `[0:1000]`; empty for all."""
        return self.spelled.removeprefix(str(self.path))

    def __len__(self) -> int:
        return self.num_rows

    def require_rows(self) -> None:
        """Raise DataError if there is no row."""
        if not self.num_rows:
            raise DataError(
                f"{self.path} has no rows {self.part}" if self.part else f"{self.path} is empty",
                why="it ends before the first of them" if self.part else "it contains no rows",
                fix=f"--set data.{self.form.field}=FILE   # a file with at least one row",
            )

    def require_good(self) -> Any:
        """Return the columns. Raises DataError if there is no row, or if any row is bad."""
        self.require_rows()
        if self.num_bad or self.columns is None:
            what = f"{self.num_bad} of {self.num_rows} rows of {self.path} cannot be used"
            raise bad_rows_error(what, self.path, self.bad, num_bad=self.num_bad)
        return self.columns

    def read(self, places: Sequence[int]) -> list[Any]:
        """Return rows by their places among the good rows, with their index in the file. Raises
        DataError if the file has changed since the pass: a resumed run would read other rows."""
        self.table.require_same()
        return [self.form.row_class._make(row) for row in self.rows.read(places)]

    def distinct_labels(self, most: int) -> tuple[list[Any], int]:
        """Return (the first row of each distinct label, at most `most` of them, evenly spread; the
        number of distinct labels)."""
        import numpy as np

        _, firsts = np.unique(self.rows.hashes("label"), return_index=True)
        firsts.sort()
        return self.read([int(firsts[n]) for n in evenly_spread_places(len(firsts), most)]), len(
            firsts
        )

    def add(self, line: int, record: dict[str, object] | str) -> None:
        """Check one row of the file and add it. Raises DataError if the columns are ambiguous or
        absent."""
        self.num_rows += 1
        self.last_line = line
        if isinstance(record, str) or not record:
            self._add_bad(line, str(record))
            return
        if self.columns is None:
            self.first = record
            self.columns = self.form.find(record, self.path)
        try:
            parsed = self.form.parse(record, line, self.columns)
            packed = pickle.dumps(tuple(parsed.row))
        except DataError:
            raise
        except ValueError as error:
            self._add_bad(line, str(error))
            return
        except RecursionError:
            self._add_bad(line, NESTED)
            return
        self.rows.add(packed, key_hash=parsed.key_hash, label_hash=parsed.label_hash)
        self.num_demonstrations += parsed.has_demonstration

    def _add_bad(self, line: int, reason: str) -> None:
        self.num_bad += 1
        if self.num_bad <= MAX_BAD_ROWS:
            self.bad.append(BadRow(line=line, reason=reason))


def read_file(
    table: Table,
    file: DataFile,
    form: RowParser,
    *,
    folder: Path | None,
    first_index: int = 0,
    source: str | None = None,
    tick: Callable[[int], None] | None = None,
) -> FileRows:
    """Read and check each row that `file` names; `table` has the rows. `folder`: where the Arrow
    file is written; `tick`: called now and then with the number of rows read. Bad rows raise
    nothing here (see `FileRows.require_good`). Raises DataError if the columns are ambiguous or
    absent, or the file cannot be read."""
    try:
        rows = FileRows(
            table=table,
            form=form,
            spelled=file.spelled(),
            rows=ArrowRows(folder),
            first_index=first_index,
            source=source,
        )
        for line, record in islice(table.records(), file.start, file.stop):
            rows.add(line, record)
            if tick is not None and not rows.num_rows % TICK_ROWS:
                tick(rows.num_rows)
        rows.rows.finish()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        place = folder or tempfile.gettempdir()
        raise DataError(
            f"there is no disk space for the rows of {table.path}",
            why=f"miles copies them to {place}, but that disk is full",
            fix=f"df -h {place}   # free some space, or name a folder on another disk",
        ) from error
    return rows


def evenly_spread_places(count: int, most: int) -> Sequence[int]:
    """Return at most `most` of the numbers 0 .. count - 1, evenly spread."""
    return range(count) if count <= most else [place * count // most for place in range(most)]


def read_places(
    files: Sequence[FileRows], places: Sequence[int]
) -> Iterator[tuple[FileRows, list[int], list[Any]]]:
    """Read the rows at `places`, counted over all files. Yield (file, its places, its rows) for
    each file that has some."""
    ends = list(accumulate(len(file) for file in files))
    for file, (begin, end) in zip(files, pairwise([0, *ends]), strict=True):
        mine = [place for place in places if begin <= place < end]
        if mine:
            yield file, mine, file.read([place - begin for place in mine])


def prompt_hashes(files: Sequence[FileRows]) -> NDArray[np.int64]:
    """Return [rows of all files] numbers, equal for equal prompts."""
    import numpy as np

    return np.concatenate([file.rows.hashes("key") for file in files])


def first_places(files: Sequence[FileRows]) -> array[int]:
    """Return the places, counted over all files, of the rows whose prompt occurs in no earlier
    row."""
    import numpy as np

    _, firsts = np.unique(prompt_hashes(files), return_index=True)
    firsts.sort()
    return array("q", firsts.astype(np.int64).tobytes())


def group_by_file(
    prompts: Sequence[Prompt], files: Sequence[FileRows]
) -> list[tuple[FileRows, list[Prompt]]]:
    """Return (file, its prompts, numbered within the file) for each file that has some of the
    prompts."""
    firsts = [file.first_index for file in files]
    parts: dict[int, list[Prompt]] = {}
    for prompt in prompts:
        number = bisect_right(firsts, prompt.index) - 1
        own = replace(prompt, index=prompt.index - firsts[number]) if firsts[number] else prompt
        parts.setdefault(number, []).append(own)
    return [(files[number], own) for number, own in sorted(parts.items())]


def describe_row(index: int, files: Sequence[FileRows]) -> str:
    """Return the name of a prompt's row in messages: `row 3 of train.jsonl`."""
    if not files:
        return f"row {index + 1}"
    file, line = _row_place(index, files)
    return f"row {line} of {file.path}"


def unusable_prompts_error(
    bad: Sequence[tuple[int, str]], files: Sequence[FileRows], *, what: str
) -> DataError:
    """Return the error that prompts cannot be used as `what`. `bad`: [1 or more] (index of the
    prompt, reason)."""
    placed = [(*_row_place(index, files), reason) for index, reason in bad]
    path = placed[0][0].path
    rows = [BadRow(line=line, reason=reason) for file, line, reason in placed if file.path == path]
    return bad_rows_error(
        f"{len(bad)} of the rows of {path} cannot be used as {what}",
        Path(path),
        rows,
        num_bad=len(bad),
    )


def _row_place(index: int, files: Sequence[FileRows]) -> tuple[FileRows, int]:
    """Return the file of the prompt with this index, and its line, counted from 1."""
    file = files[bisect_right([file.first_index for file in files], index) - 1]
    return file, index - file.first_index + 1
