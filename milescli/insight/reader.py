"""Reads what a run has written since the last read. An incomplete line is read the next time; a
file that was replaced is read from its start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from milescli.checkpoint.run_dir import RunDir
from milescli.core.files import open_regular, parse_json
from milescli.core.history import History

BLOCK_BYTES = 2**20
"""Largest number of bytes of one read."""
DAMAGED = (KeyError, TypeError, ValueError, AttributeError)
"""What reading a record raises if its line is damaged, or of another version: it lacks fields."""


class LineReader:
    """Reads the JSON objects of a growing file, one per line."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._at = 0
        self._inode: int | None = None

    def new(self) -> tuple[list[dict[str, Any]], bool]:
        """Return (records written since the last call, True if the file was replaced). No records
        if there is no file."""
        found, is_new = list[dict[str, Any]](), False
        for records, began in self.blocks():
            found += records
            is_new = is_new or began
        return found, is_new

    def blocks(self) -> Iterator[tuple[list[dict[str, Any]], bool]]:
        """Yield the same as `new`, block by block, so that a huge file is never in memory as a
        whole; only the first block can say that the file was replaced."""
        try:
            with open_regular(self.file) as opened:
                status = os.fstat(opened.fileno())
                is_new = self._inode is not None and (
                    status.st_ino != self._inode or status.st_size < self._at
                )
                self._at, self._inode = 0 if is_new else self._at, status.st_ino
                opened.seek(self._at)
                rest = b""
                while block := opened.read(BLOCK_BYTES):
                    *lines, rest = (rest + block).split(b"\n")
                    self._at = opened.tell() - len(rest)
                    yield [one for line in lines if (one := object_of(line)) is not None], is_new
                    is_new = False
                if is_new:
                    yield [], True
        except OSError:
            return


class RunReader:
    """Keeps the history of a run up to date."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.history = History(name=run.full_name)
        self._lines = LineReader(run.events_file)

    def update(self) -> int:
        """Read new records, and return their number. `history` becomes a new object if the file was
        replaced."""
        count = 0
        for records, is_new in self._lines.blocks():
            if is_new:
                self.history = History(name=self.run.full_name)
            for record in records:
                if "event" in record:
                    with suppress(*DAMAGED):
                        self.history.feed(record)
            count += len(records)
        return count


def read_history(run: RunDir) -> History:
    """Read the history of a run up to now."""
    reader = RunReader(run)
    reader.update()
    return reader.history


def object_of(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if it is torn, or holds something else."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            record = parse_json(line)  # knows NaN, which a sick run may tell of
        except ValueError:
            return None  # torn by a full disk or a killed driver
    return record if isinstance(record, dict) else None
