"""Where a report goes: a file that is new, or a report of ours that it replaces, atomically."""

from __future__ import annotations

import os
import secrets
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
    if file.is_dir():
        raise MilesError(
            f"{file} is a folder",
            why="a report is one file",
            fix=f"--to {file / 'report.html'}",
        )
    if not file.parent.is_dir():
        raise MachineError(
            f"there is no folder {file.parent}",
            why="a report is written into one that is there",
            fix=f"mkdir -p {file.parent}",
        )
    if file.exists() and not force and not _is_ours(file):
        raise MilesError(
            f"{file} is no report of miles",
            why="it would be written over",
            fix=["--force   # write over it", f"--to {file.with_stem(file.stem + '-2')}"],
        )


def write(file: Path, text: str, *, force: bool) -> None:
    """All of it or nothing. Raises as `require_writable`."""
    require_writable(file, force=force)
    target = file.resolve()
    fresh = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        fresh.write_text(text, encoding="utf-8", errors="replace")
        os.replace(fresh, target)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise MachineError(
            f"{file} cannot be written",
            why=f"{type(error).__name__}: {error.strerror or error}",
            fix=[f"ls -ld {file.parent}   # whose is it?", f"df -h {file.parent}"],
        ) from error


def _is_ours(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            head = opened.read(_HEAD_BYTES)
    except OSError:
        return False
    return not head.strip() or any(mark in head for mark in _MARKS)
