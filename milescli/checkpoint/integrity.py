"""Whether the files of a folder are those that were written: SHA-256 of each, what makes names and
bytes outlast a power cut, and the room that is left. Knows nothing of manifests, and imports
nothing heavy. Called by the store, by ranks that write, and by whoever tells of a full disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from milescli.core.files import sha256_of

MAX_THREADS = 8
"""That hash at once: hashing gives up the interpreter's lock."""


def free_bytes(folder: Path) -> int:
    """What a user may still write into the file system of `folder`, or of its nearest parent that
    is there."""
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def sha256_of_files(
    folder: Path, names: Iterable[str], *, progress: Callable[[int], None] | None = None
) -> dict[str, str]:
    """Name -> SHA-256 of files of a folder, several at once. `progress` is told, from any thread,
    how many more bytes were read. Raises OSError."""
    listed = list(names)
    with ThreadPoolExecutor(max_workers=min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        digests = threads.map(lambda name: sha256_of(folder / name, progress=progress), listed)
        return dict(zip(listed, digests, strict=True))


def changed_file(
    folder: Path, sha256: Mapping[str, str], *, progress: Callable[[int], None] | None = None
) -> tuple[str, str] | None:
    """(name, SHA-256 now) of the first file that is not what `sha256` says; None where all are.
    `progress`: see `sha256_of_files`. Raises OSError."""
    now = sha256_of_files(folder, sha256, progress=progress)
    return next(((name, now[name]) for name in sha256 if now[name] != sha256[name]), None)


def sync_tree(folder: Path) -> None:
    """Make all files below `folder`, their names, its own and its parent's durable, the innermost
    first: a name that outlasts a power cut then has its bytes."""
    for path, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(path) / name)
        sync(Path(path))
    sync(folder.parent)
    sync(folder.parent.parent)


def sync(path: Path) -> None:
    """A file's bytes, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
