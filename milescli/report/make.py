"""Makes a report from the folder of a run, or of two: the one call of the command."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from milescli.checkpoint.run_dir import open_run
from milescli.core.errors import MachineError, MilesError, unreadable_folder
from milescli.core.files import open_regular, read_regular_bytes
from milescli.core.private import without_paths
from milescli.report.compare import RunsCompared, compare, compare_figures
from milescli.report.markdown import MARK
from milescli.report.subject import Subject, read_subject


def run_figures(subject: Subject) -> dict[str, Any]:
    """Return all numbers and decisions of a report, with its samples and recipe keys."""
    curve = subject.points(subject.curve)
    return {
        "run": subject.name,
        "state": subject.summary.state,
        "summary": without_places(asdict(subject.summary)),
        "curve": {
            "name": subject.curve,
            "steps": [step for step, _ in curve],
            "values": [value for _, value in curve],
        },
        "evaluations": [asdict(one) for one in subject.evaluations],
        "sets": [asdict(one) for one in subject.sets],
        "samples": [asdict(one) for one in subject.samples],
        "recipe": [asdict(key) for key in subject.keys if key.is_set],
        "versions": subject.versions(),
        "machine": subject.machine,
        "data": {
            name: {key: one.get(key) for key in ("num_rows", "sha256")}
            for name, one in subject.data().items()
        },
        "adapters": {one.history.name: run_figures(one) for one in subject.adapters},
    }


def without_places(value: Any) -> Any:
    """Return a JSON value without paths of the machine, tokens and logins, at any depth."""
    if isinstance(value, str):
        return without_paths(value)
    if isinstance(value, Mapping):
        return {name: without_places(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_places(item) for item in value]
    return value


HTML, MARKDOWN = (".html", ".htm"), (".md", ".markdown")
"""Ends of names."""
HTML_MARK = '<meta name="generator" content="miles report">'
"""Mark that identifies an HTML file as a report."""
_MARKS = (HTML_MARK.encode(), MARK.encode())
_HEAD_BYTES = 4096
"""Bytes at the start of a file in which the mark must be."""


def is_html(file: Path) -> bool:
    """Return True if the file's name ends like that of HTML; otherwise the file is Markdown."""
    return file.suffix.lower() in HTML


def require_writable(file: Path, *, force: bool) -> None:
    """Raise MilesError if the file exists and is no report, MachineError if it cannot be written.
    Called before anything is read, and again by `write`."""
    try:
        is_there, is_file, has_folder = file.exists(), file.is_file(), file.parent.is_dir()
    except OSError as error:  # of a folder that this user may not enter, or of a name too long
        raise _not_written(file, error) from error
    another = file.with_stem(f"{file.stem}-2")
    if is_there and not is_file:
        raise MilesError(
            f"{file} is not a file",
            why="a report is one file",
            fix=shlex.join(["--to", str(file / "report.html" if file.is_dir() else another)]),
        )
    if not has_folder:
        raise MachineError(
            f"the folder {file.parent} does not exist",
            why="a report is written into an existing folder",
            fix=shlex.join(["mkdir", "-p", str(file.parent)]),
        )
    if is_there and not force and not _is_ours(file):
        raise MilesError(
            f"{file} is not a report of miles",
            why="it would be overwritten",
            fix=["--force   # overwrite it", shlex.join(["--to", str(another)])],
        )


def write(file: Path, text: str, *, force: bool) -> None:
    """Write all of the text or nothing; a replaced file keeps its permissions. Raises as
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
    folder = shlex.quote(str(file.parent))
    return MachineError(
        f"{file} cannot be written",
        why=f"{type(error).__name__}: {error.strerror or error}",
        fix=[f"ls -ld {folder}   # who owns it?", f"df -h {folder}"],
    )


def _is_ours(file: Path) -> bool:
    try:
        with open_regular(file) as opened:
            head = opened.read(_HEAD_BYTES)
    except OSError:
        return False
    return not head.strip() or any(mark in head for mark in _MARKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Holds a report, and its content."""

    text: str
    """HTML or Markdown."""
    sentence: str
    """The verdict."""
    figures: dict[str, Any]
    """The content as JSON values, for programs."""


def report_run(folder: Path, *, form: Callable[[Subject], str]) -> Report:
    """Report on one run; `form` writes the text. Raises MachineError if its files cannot be
    read."""
    subject = _read(folder)
    return Report(
        text=form(subject),
        sentence=subject.verdict.headline,
        figures=run_figures(subject),
    )


def _read(folder: Path) -> Subject:
    run = open_run(folder)
    try:
        read_regular_bytes(run.recipe_file)
        if run.events_file.exists():
            open_regular(run.events_file).close()
        return read_subject(run)
    except PermissionError as error:
        raise unreadable_folder(folder, error) from error


def compare_runs(folder: Path, other: Path, *, form: Callable[[RunsCompared], str]) -> Report:
    """Compare two runs, the first minus the second. Raises as `report_run`."""
    compared = compare(_read(folder), _read(other))
    return Report(
        text=form(compared),
        sentence=compared.headline,
        figures=compare_figures(compared),
    )
