"""Implements `logs`: lists the logs of a run's attempts, and returns lines of one: by number, from
the end, or those that contain a text. Reads no more of a huge file than necessary."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from milescli.web.files import LONGEST_BYTES, LineIndex, LineIndexes, file_within, readable
from milescli.web.run_request import Json, RunRequest

MAX_LIMIT = 5000
MAX_FILES = 2000
"""Largest number of files listed for one attempt."""
LONGEST_LINE = 10_000
"""Largest number of characters shown of a line."""
SEARCH_S = 3.0
"""Time limit of one search in seconds."""


def attempts(request: RunRequest) -> Json:
    """List the log files of all attempts, oldest first, and of `miles eval`."""
    folder = request.with_logs.path / "logs"
    names = [attempt.name for attempt in request.with_logs.attempts()]
    others = (one.name for one in folder.glob("*") if one.is_dir() and not one.is_symlink())
    names += sorted(name for name in others if name not in names)
    return {"attempts": [{"name": name, "files": _files(folder / name)} for name in names]}


class Logs:
    """Returns lines of logs, and caches where the lines of each file begin."""

    def __init__(self) -> None:
        self._indexes = LineIndexes()

    def lines(self, request: RunRequest) -> Json:
        """Return lines of one file. `total`: all lines, or all that match; `is_all`: False if
        counting or searching ran out of time. `offset` is from the start; with `tail`, from the
        end."""
        name = f"logs/{request.names['attempt']}/{request.names['file']}"
        file = file_within(request.with_logs.path, name)
        query = request.query
        offset, limit = query.count("offset", 0), query.count("limit", 500, high=MAX_LIMIT)
        text, is_tail = query.text("q"), query.count("tail", 0, high=1) == 1
        index = self._indexes.of(file)
        with index.lock, readable(file):
            index.count()
            if text:
                lines, total, is_all = _search(index, text, offset, limit, is_tail=is_tail)
            else:
                total, is_all = index.num_lines, index.is_whole
                first = max(0, total - offset - limit) if is_tail else offset
                size = min(limit, total - offset) if is_tail else limit
                lines = list(enumerate(index.lines(first, size), first))
        return {
            "total": total,
            "is_all": is_all,
            "lines": [{"number": number + 1, "text": _shown(line)} for number, line in lines],
        }


def _files(folder: Path) -> list[Json]:
    files = list[Json]()
    for file in sorted(folder.rglob("*"))[:MAX_FILES]:
        try:
            if file.is_file():
                name = file.relative_to(folder).as_posix()
                files.append({"name": name, "size_bytes": file.stat().st_size})
        except OSError:
            continue
    return files


def _search(
    index: LineIndex, text: str, offset: int, limit: int, *, is_tail: bool
) -> tuple[list[tuple[int, bytes]], int, bool]:
    """Return ((number, line) of the lines to show, number of matches, True if the whole file was
    searched)."""
    until, total = time.monotonic() + SEARCH_S, 0
    newest = deque[tuple[int, bytes]]()
    for fitting in (_backwards if is_tail else _forwards)(index, text):
        for one in fitting:
            total += 1
            if total > offset and len(newest) < limit:
                (newest.appendleft if is_tail else newest.append)(one)
        if time.monotonic() > until:
            return list(newest), total, False
    return list(newest), total, index.is_whole


def _forwards(index: LineIndex, text: str) -> Iterator[list[tuple[int, bytes]]]:
    """Yield for each block the matching lines that end in it."""
    number, rest = 0, b""
    for data in index.blocks(0):
        head, found, tail = (rest + data).rpartition(b"\n")
        yield _matching_lines(head, text, number) if found else []
        number += head.count(b"\n") + len(found)
        rest = tail[:LONGEST_BYTES]
    yield _matching_lines(rest, text, number)


def _backwards(index: LineIndex, text: str) -> Iterator[list[tuple[int, bytes]]]:
    """Yield the matching lines from the end on, newest first."""
    rest = b""
    for number, data in index.blocks_backwards():
        head, found, tail = (data + rest).partition(b"\n")
        yield _matching_lines(tail, text, number + 1)[::-1] if found else []
        rest = head[:LONGEST_BYTES]
    yield _matching_lines(rest, text, 0)


def _matching_lines(data: bytes, text: str, first: int) -> list[tuple[int, bytes]]:
    """Return (number, line) of the lines of `data` that contain the text in any case; numbers start
    at `first`."""
    small = text.lower()
    if not small.isascii():
        return [
            (number, line)
            for number, line in enumerate(data.split(b"\n"), first)
            if small in line.decode(errors="replace").lower()
        ]
    wanted = small.encode()
    if wanted not in data.lower():
        return []
    lines = enumerate(data.split(b"\n"), first)
    return [(number, line) for number, line in lines if wanted in line.lower()]


def _shown(line: bytes) -> str:
    text = line[: 4 * LONGEST_LINE].decode(errors="replace").rstrip("\r")
    return text if len(text) <= LONGEST_LINE else f"{text[:LONGEST_LINE]} …"
