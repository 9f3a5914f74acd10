"""Copies of folders in an object store. A record of sizes and digests is written first (of files
that are sent one by one, before each) and one chosen object last, so that an upload that was cut
short is seen to be incomplete, and the next one goes on with what is missing. What is fetched is
compared with the record."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from milescli.backends.stores.store import ObjectStore
from milescli.core.errors import CheckpointError
from milescli.core.files import parse_json, sha256_of

RECORD = ".miles-upload.json"
"""Object of a copy that lists its others: {path: {size_bytes, sha256}}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Describes one object of a copy."""

    size_bytes: int
    sha256: str


NOTHING: Mapping[str, Stored] = MappingProxyType({})


def upload(
    store: ObjectStore,
    files: Mapping[str, Path],
    *,
    sha256: Mapping[str, str],
    last: str,
    below: str = "",
    already: Mapping[str, Stored] = NOTHING,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> int:
    """Copy files to a folder of the store, by their paths in it; `last` is written last. `sha256`
    holds the digests that are known. Objects of an earlier copy that differ are removed first, and
    equal ones are not sent again; `progress` counts them. `already`: other objects of the copy,
    which `upload_one` has sent. Returns the bytes that were sent. Raises StoreError,
    CheckpointError if one of `already` is gone, and OSError if a file cannot be read."""
    wanted = {
        name: Stored(size_bytes=file.stat().st_size, sha256=sha256.get(name) or sha256_of(file))
        for name, file in files.items()
    } | dict(already)
    there = store.sizes(below)
    before = read_record(store, below) if RECORD in there else {}
    is_equal = {
        name
        for name, size in there.items()
        if name in wanted and before.get(name) == wanted[name] and size == wanted[name].size_bytes
    }
    if gone := sorted(already.keys() - is_equal):
        raise CheckpointError(
            f"the object {store.url}/{_join(below, gone[0])} was lost while others were uploaded",
            why="it is gone, or another upload has replaced it",
            fix="repeat the command, which sends what is missing",
        )
    if is_equal != wanted.keys():
        is_equal.discard(last)  # whatever is missing, the copy is not complete meanwhile
    ours = there.keys() & (before.keys() | wanted.keys())
    stale = sorted(ours - is_equal, key=lambda name: name != last)
    store.remove([_join(below, name) for name in stale])
    if before != wanted:
        _write_record(store, below, wanted)
    progress(sum(wanted[name].size_bytes for name in is_equal))
    sent = 0
    for name in sorted(wanted.keys() - is_equal, key=lambda name: (name == last, name)):
        store.put(files[name], _join(below, name), progress=progress)
        sent += wanted[name].size_bytes
    return sent


def upload_one(
    store: ObjectStore,
    file: Path,
    name: str,
    *,
    below: str = "",
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> Stored:
    """Copy one file of a folder whose others are not made yet; `upload` completes the copy. An
    object that is there and equal by the record is not sent again. Raises as `upload`."""
    own = Stored(size_bytes=file.stat().st_size, sha256=sha256_of(file))
    record = read_record(store, below)
    if record.get(name) == own and store.sizes(below).get(name) == own.size_bytes:
        progress(own.size_bytes)
        return own
    # what is there is not what the record says, until it says so
    store.remove([_join(below, name)])
    _write_record(store, below, {**record, name: own})
    store.put(file, _join(below, name), progress=progress)
    return own


def _write_record(store: ObjectStore, below: str, record: Mapping[str, Stored]) -> None:
    text = json.dumps({name: asdict(one) for name, one in sorted(record.items())}, indent=1)
    store.write(_join(below, RECORD), text.encode())


def read_record(store: ObjectStore, below: str = "") -> dict[str, Stored]:
    """Return what an upload recorded of its objects; empty if there is no record. Raises
    CheckpointError if it is damaged."""
    text = store.read(_join(below, RECORD))
    if text is None:
        return {}
    try:
        record = {name: Stored(**one) for name, one in parse_json(text).items()}
        for name, one in record.items():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not name or name == RECORD:
                raise ValueError(f"`{name}` is outside of the copy")
            if not (isinstance(one.size_bytes, int) and isinstance(one.sha256, str)):
                raise ValueError(f"`{name}` has no size and digest")
    except (ValueError, TypeError, AttributeError) as error:
        raise damaged(store, _join(below, RECORD), why=f"{type(error).__name__}: {error}") from None
    return record


def fetch(
    store: ObjectStore,
    record: Mapping[str, Stored],
    *,
    below: str,
    into: Callable[[str], Path],
    progress: Callable[[int], object],
) -> None:
    """Fetch the objects of a copy. `into` maps the path of each to its file. A file that is there
    and right is not fetched again. Raises CheckpointError if an object is missing, or is not what
    the record says; StoreError."""
    there = store.sizes(below)
    for name, wanted in record.items():
        file = into(name)
        if _is_same(file, wanted):
            progress(wanted.size_bytes)
            continue
        if (size := there.get(name)) != wanted.size_bytes:
            has = "is missing" if size is None else f"has {size}"
            why = f"it should have {wanted.size_bytes} bytes, but {has}"
            raise damaged(store, _join(below, name), why=why)
        file.parent.mkdir(parents=True, exist_ok=True)
        store.get(_join(below, name), file, size_bytes=wanted.size_bytes, progress=progress)
        if (now := sha256_of(file)) != wanted.sha256:
            why = f"its SHA-256 should be {wanted.sha256[:12]}... and is {now[:12]}..."
            file.unlink()
            raise damaged(store, _join(below, name), why=why)


def _is_same(file: Path, wanted: Stored) -> bool:
    return (
        file.is_file()
        and file.stat().st_size == wanted.size_bytes
        and sha256_of(file) == wanted.sha256
    )


def damaged(store: ObjectStore, name: str, *, why: str) -> CheckpointError:
    """Return the error of an object that is not what was written."""
    return CheckpointError(
        f"the object {store.url}/{name} is damaged",
        why=why,
        fix="restore the object, or use another copy",
    )


def _join(below: str, name: str) -> str:
    return f"{below}/{name}" if below else name
