"""SHA-256 of a file. The one place that hashes one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

_CHUNK_BYTES = 16 * 2**20


def sha256_of(path: Path, *, progress: Callable[[int], None] | None = None) -> str:
    """Of the file's bytes, 64 hex digits. `progress` is told how many more were read. Raises
    OSError."""
    with path.open("rb") as file:
        if progress is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            progress(len(chunk))
        return digest.hexdigest()
