"""Checks that the files of a folder are unchanged (SHA-256 of each), makes names and bytes durable,
and reports free space. Knows nothing of manifests, and imports nothing heavy. Called by the store,
by ranks that write, and by code that reports a full disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from milescli.core.files import sha256_of

MAX_THREADS = 8
"""Threads that hash at once: hashing releases the interpreter lock."""


def free_bytes(folder: Path) -> int:
    """Return the bytes that a user may still write into the file system of `folder`, or of its
    nearest existing parent."""
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def sha256_of_files(
    folder: Path, names: Iterable[str], *, progress: Callable[[int], None] | None = None
) -> dict[str, str]:
    """Map the names of files in a folder to their SHA-256, hashing several at once. `progress` gets
    the number of newly read bytes, from any thread. Raises OSError."""
    listed = list(names)
    with ThreadPoolExecutor(max_workers=min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        digests = threads.map(lambda name: sha256_of(folder / name, progress=progress), listed)
        return dict(zip(listed, digests, strict=True))


def changed_file(
    folder: Path, sha256: Mapping[str, str], *, progress: Callable[[int], None] | None = None
) -> tuple[str, str] | None:
    """Return (name, current SHA-256) of the first file whose hash differs from `sha256`; None if
    there is none. `progress` works as in `sha256_of_files`. Raises OSError."""
    now = sha256_of_files(folder, sha256, progress=progress)
    return next(((name, now[name]) for name in sha256 if now[name] != sha256[name]), None)


def sync_tree(folder: Path) -> None:
    """Make all files below `folder` durable, then their names, its own and its parent's, innermost
    first: after a power cut, every name that exists has its bytes."""
    for path, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(path) / name)
        sync(Path(path))
    sync(folder.parent)
    sync(folder.parent.parent)


def sync(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
