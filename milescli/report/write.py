"""Where a report goes: a file that is new, or a report of ours that it replaces, atomically."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from milescli.core.errors import MachineError, MilesError
from milescli.report import frame, markdown

HTML, MARKDOWN = (".html", ".htm"), (".md", ".markdown")
"""Ends of names."""
_MARKS = (frame.MARK.encode(), markdown.MARK.encode())
_HEAD_BYTES = 4096
"""In which a mark of ours stands."""


def is_html(file: Path) -> bool:
    """By its name; else it is Markdown."""
    return file.suffix.lower() in HTML


def require_writable(file: Path, *, force: bool) -> None:
    """Raises MilesError where something else lies there, MachineError where nothing can be written.
    Asked before anything is read, and again by `write`."""
    try:
        is_there, is_file, has_folder = file.exists(), file.is_file(), file.parent.is_dir()
    except OSError as error:  # of a folder that this user may not enter, or of a name too long
        raise _not_written(file, error) from error
    another = file.with_stem(f"{file.stem}-2")
    if is_there and not is_file:
        raise MilesError(
            f"{file} is not a file",
            why="a report is one file",
            fix=f"--to {file / 'report.html' if file.is_dir() else another}",
        )
    if not has_folder:
        raise MachineError(
            f"there is no folder {file.parent}",
            why="a report is written into one that is there",
            fix=f"mkdir -p {file.parent}",
        )
    if is_there and not force and not _is_ours(file):
        raise MilesError(
            f"{file} is no report of miles",
            why="it would be written over",
            fix=["--force   # write over it", f"--to {another}"],
        )


def write(file: Path, text: str, *, force: bool) -> None:
    """All of it or nothing; who may read a file that is there may read the new one. Raises as
    `require_writable`."""
    require_writable(file, force=force)
    target = file.resolve()
    fresh = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        fresh.write_text(text, encoding="utf-8", errors="replace")
        if target.exists():
            shutil.copymode(target, fresh)
        os.replace(fresh, target)
    except OSError as error:
        raise _not_written(file, error) from error
    finally:
        fresh.unlink(missing_ok=True)


def _not_written(file: Path, error: OSError) -> MachineError:
    return MachineError(
        f"{file} cannot be written",
        why=f"{type(error).__name__}: {error.strerror or error}",
        fix=[f"ls -ld {file.parent}   # whose is it?", f"df -h {file.parent}"],
    )


def _is_ours(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            head = opened.read(_HEAD_BYTES)
    except OSError:
        return False
    return not head.strip() or any(mark in head for mark in _MARKS)
