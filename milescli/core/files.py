"""What is read of whole files: their SHA-256, and the end of those that grow (a log, for an error
message; records, one a line). The one place that reads these."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 16 * 2**20


def sha256_of(path: Path, *, progress: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of the file's bytes, 64 hex digits. `progress` receives how many more
    bytes were read. Raises OSError."""
    with path.open("rb") as file:
        if progress is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            progress(len(chunk))
        return digest.hexdigest()


NUM_LINES = 12
_READ_BYTES = 64 * 1024


def last_records(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of the last lines, newest first; a torn line is left out. Nothing where
    there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _READ_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in reversed(lines):
        with suppress(ValueError):
            if isinstance(record := json.loads(line), dict):
                yield record


def last_log_lines(path: Path | None, num_lines: int = NUM_LINES, *, since: int = 0) -> str:
    """The last lines that are not blank, of those that begin at byte `since`; says so where there
    is no log."""
    if path is None:
        return "(its log is not on this machine)"
    try:
        with path.open("rb") as log:
            log.seek(max(since, path.stat().st_size - _READ_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"(no log: {error})"
    lines = [line for line in lines if line.strip()][-num_lines:]
    return "\n".join(f"  | {line}" for line in lines) or "(empty log)"


def log_age(path: Path) -> str:
    """When it was last written, for an error: `3 s ago`."""
    try:
        return f"{time.time() - path.stat().st_mtime:.0f} s ago"
    except OSError:
        return "never"
