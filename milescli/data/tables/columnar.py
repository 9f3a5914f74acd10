"""Parquet and arrow: read batch by batch. Single rows come from a copy of the columns that are
needed, uncompressed and mapped: a row within a compressed group costs the whole group."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.core.errors import DataError
from milescli.core.files import sha256_of
from milescli.data.tables.base import Record, Stamp

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 1024


class ColumnarTable:
    """See `Table`. Rows are named by their number, counted from 1."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = Stamp(path)
        self._kept: pa.Table | None = None
        self._share = 0.0
        self._num_rows = 0
        """Of a parquet file; 0: not known."""

    def records(self) -> Iterator[Record]:
        """See `Table`."""
        number, self._share = 0, 0.0
        for batch in self._batches(None):
            with self._explained():
                rows = batch.to_pylist()
            for row in rows:
                number += 1
                yield number, row
            self._share = self._share_of(number)
        self._stamp.require_same()

    def keep(self, columns: Sequence[str], *, folder: Path) -> None:
        """See `Table`."""
        import pyarrow as pa

        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".rows-", suffix=".arrow", dir=folder)
        os.close(handle)
        try:
            writer = None
            for batch in self._batches(columns):
                writer = writer or pa.ipc.new_file(name, batch.schema)
                writer.write_batch(batch)
            assert writer is not None, "rows are fetched of a file that has some"
            writer.close()
            self._kept = pa.ipc.open_file(pa.memory_map(name)).read_all()
        finally:
            os.unlink(name)  # what is mapped stays until the process ends

    def fetch(self, places: Sequence[int]) -> list[Record]:
        """See `Table`."""
        self._stamp.require_same()
        assert self._kept is not None, "`keep` comes before"
        return [(place + 1, self._kept.slice(place, 1).to_pylist()[0]) for place in places]

    @property
    def size_bytes(self) -> int:
        """See `Table`."""
        if self.path.suffix != ".parquet":
            return self.path.stat().st_size
        import pyarrow.parquet as pq

        with self._explained():
            groups = pq.read_metadata(self.path)
        return sum(groups.row_group(n).total_byte_size for n in range(groups.num_row_groups))

    @property
    def share_read(self) -> float:
        """See `Table`."""
        return self._share

    def _share_of(self, num_rows: int) -> float:
        """0 of an arrow file, which does not say how many rows it has."""
        return min(1.0, num_rows / self._num_rows) if self._num_rows else 0.0

    @property
    def sha256(self) -> str:
        """See `Table`."""
        return sha256_of(self.path)

    def _batches(self, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        with self._explained():
            for batch in self._parquet(columns) if self._is_parquet else self._arrow(columns):
                names = batch.schema.names
                if twice := next((name for name in names if names.count(name) > 1), None):
                    raise DataError(
                        f"{self.path} cannot be used",
                        why=f"two of its columns are called {twice}",
                        fix=f"write {self.path} with another name for one of them",
                    )
                yield batch

    @property
    def _is_parquet(self) -> bool:
        return self.path.suffix == ".parquet"

    def _parquet(self, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path, memory_map=True) as file:
            self._num_rows = file.metadata.num_rows
            yield from file.iter_batches(BATCH_ROWS, columns=columns)

    def _arrow(self, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        with pa.memory_map(str(self.path)) as source:
            try:
                file = pa.ipc.open_file(source)
                batches = (file.get_batch(n) for n in range(file.num_record_batches))
            except pa.ArrowInvalid:  # the form of a stream, which has no table of contents
                source.seek(0)
                batches = iter(pa.ipc.open_stream(source))
            for batch in batches:
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    part = batch.slice(start, BATCH_ROWS)
                    yield part if columns is None else part.select(list(columns))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"cannot read {self.path}",
                why=f"not {'a parquet' if self._is_parquet else 'an arrow'} file: "
                f"{next(iter(str(error).splitlines()), type(error).__name__)}",
                fix=f"head -c 100 {self.path}   # what is it?",
            ) from error
