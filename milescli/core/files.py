"""Reads files and text with any content: whole files, their SHA-256, the end of growing files
(logs, records), and JSON and YAML that miles did not just write itself. Nothing here waits for a
FIFO's writer or reads an endless device; endless nesting and digits raise ordinary errors."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from milescli.core.errors import MilesError, printable

_CHUNK_BYTES = 16 * 2**20
MAX_BYTES = 256 * 2**20
"""Most bytes of a file that is read whole; the index of a release with 10^6 tensors has a third of
it. Files that grow with a run (events, samples) are read by `read_lines`."""
NESTED_TOO_DEEPLY = "nested too deeply"


class UnreadableFile(MilesError, OSError):
    """Reports that a path is not a readable file: a folder, a FIFO, a device, or a loop of
    links."""

    def __init__(self, path: Path, number: int, reason: str) -> None:
        """State the operating system's error for `path`, or what it is."""
        super().__init__(
            f"{path} cannot be read",
            why=f"{reason}, where a file should be",
            fix=f"ls -ld {shlex.quote(str(path))}   # remove it, or put the file back",
        )
        self.errno, self.strerror, self.filename = number, reason, str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return UnreadableFile, (Path(self.filename), self.errno, self.strerror)

    def __str__(self) -> str:
        return OSError.__str__(self)


_PATH_ERRORS = {
    errno.ENAMETOOLONG: "getconf NAME_MAX .   # the longest name here, in bytes",
    errno.EACCES: "ls -ld {path}   # who may use it; `namei -l` shows each folder above it",
    errno.EPERM: "lsattr -d {path}   # or its owner is another user",
    errno.EROFS: "findmnt -T {path}   # its file system is mounted read-only",
    errno.ELOOP: "readlink {path}   # its links lead back to themselves",
    errno.ENOTDIR: "namei -l {path}   # which part of it is a file?",
    errno.EISDIR: "ls -ld {path}   # a folder, where a file should be",
}
"""Error number -> a command that shows more about the path, for errors that the path causes."""
_PARENT_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS)
_SHOWN_PATH = 200


def path_error(error: OSError) -> MilesError | None:
    """Return the error for users if the operating system refuses the path itself (too long a name,
    no permission, a read-only file system); None for any other error."""
    if not isinstance(error.filename, str | bytes) or error.errno not in _PATH_ERRORS:
        return None
    path = os.fsdecode(error.filename)
    folder = os.path.dirname(path) or "."
    is_new = os.access(folder, os.X_OK) and not os.path.lexists(path)
    if is_new and error.errno in _PARENT_ERRORS:
        path = folder  # which refused a new file, maybe one with a temporary name
    if len(path) > _SHOWN_PATH:
        path = f"{path[: _SHOWN_PATH // 2]}...{path[-_SHOWN_PATH // 2 :]}"
    return MilesError(
        f"`{path}` cannot be used",
        why=error.strerror,
        fix=_PATH_ERRORS[error.errno].format(path=shlex.quote(path)),
    )


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read its bytes. Raises FileNotFoundError, PermissionError, or UnreadableFile,
    which is an OSError too."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:
        raise UnreadableFile(path, error.errno, error.strerror) from None
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return open(file, "rb")
    os.close(file)
    if stat.S_ISDIR(mode):
        raise UnreadableFile(path, errno.EISDIR, os.strerror(errno.EISDIR))
    raise UnreadableFile(path, errno.EINVAL, "Not a regular file")


def read_regular_bytes(path: Path) -> bytes:
    """Return the bytes of a file. Raises OSError as `open_regular`, or if it is larger than
    MAX_BYTES."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_BYTES:
            raise UnreadableFile(path, errno.EFBIG, f"Larger than {MAX_BYTES:,} bytes")
        return file.read()


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of a file that grows with a run, of any size. Raises OSError as
    `open_regular`."""
    with open_regular(path) as file:
        return file.read().splitlines()


def read_regular_text(path: Path, *, errors: str = "strict") -> str:
    """Return the text of a file in UTF-8. Raises UnicodeDecodeError, unless `errors` says what to
    do instead, and OSError as `read_regular_bytes`."""
    text = read_regular_bytes(path).decode("utf-8", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str | bytes | bytearray, **hooks: Any) -> Any:
    """Return the value of a JSON text. `hooks` are those of `json.loads`. Raises JSONDecodeError in
    every case: also for bytes that are not UTF-8, for nesting that Python cannot recurse into, and
    for numbers with more digits than Python reads."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"), **hooks)
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError(f"no UTF-8 at byte {error.start}", "", 0) from error
    except RecursionError:
        raise json.JSONDecodeError(NESTED_TOO_DEEPLY, "", 0) from None
    except ValueError as error:  # Python's limit of digits
        raise json.JSONDecodeError(str(error).partition(";")[0], "", 0) from error


def read_json(path: Path) -> Any:
    """Return the value of a JSON file. Raises JSONDecodeError as `parse_json`, and OSError as
    `read_regular_bytes`."""
    return parse_json(read_regular_bytes(path))


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text. Raises YAMLError in every case, as `parse_json` does."""
    import yaml

    try:
        return yaml.safe_load(text)
    except (ValueError, RecursionError) as error:
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from None


def sha256_of(path: Path, *, progress: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of the file's bytes, 64 hex digits. `progress` receives how many more
    bytes were read. Raises OSError."""
    with open_regular(path) as file:
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
    """Yield the JSON objects of the last lines, newest first; a torn line is left out. Nothing if
    there is no file."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, path.stat().st_size - _READ_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in reversed(lines):
        with suppress(ValueError):
            if isinstance(record := parse_json(line), dict):
                yield record


def last_log_lines(path: Path | None, num_lines: int = NUM_LINES, *, since: int = 0) -> str:
    """Return the last non-blank lines of those that begin at byte `since`; a note if there is no
    log."""
    if path is None:
        return "(its log is not on this machine)"
    try:
        with open_regular(path) as log:
            log.seek(max(since, path.stat().st_size - _READ_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"(no log: {error})"
    lines = [line for line in lines if line.strip()][-num_lines:]
    return printable("\n".join(f"  | {line}" for line in lines)) or "(empty log)"


def log_age(path: Path) -> str:
    """Return when the log was last written, for an error: `3 s ago`."""
    try:
        return f"{time.time() - path.stat().st_mtime:.0f} s ago"
    except OSError:
        return "never"
