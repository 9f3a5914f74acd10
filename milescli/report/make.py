"""A report from the folder of a run, or from two: the one call of the command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milescli.checkpoint.run_dir import open_run
from milescli.core.errors import unreadable
from milescli.report.compare import compare
from milescli.report.compare_page import compare_figures, compare_markdown, compare_page
from milescli.report.figures import run_figures
from milescli.report.markdown import run_markdown
from milescli.report.run_page import run_page
from milescli.report.subject import Subject, read_subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What was made."""

    text: str
    """HTML or Markdown."""
    sentence: str
    """The verdict."""
    figures: dict[str, Any]
    """For programs."""


def report_run(folder: Path, *, html: bool) -> Reported:
    """Of one run. Raises MachineError where its files may not be read."""
    subject = _read(folder)
    return Reported(
        text=run_page(subject) if html else run_markdown(subject),
        sentence=subject.verdict.headline,
        figures=run_figures(subject),
    )


def _read(folder: Path) -> Subject:
    run = open_run(folder)
    try:
        run.recipe_file.read_bytes()
        if run.events_file.exists():
            run.events_file.open("rb").close()
        return read_subject(run)
    except PermissionError as error:
        raise unreadable(folder, error, what="run") from error


def compare_runs(folder: Path, other: Path, *, html: bool) -> Reported:
    """Of two runs, the first less the second. Raises as `report_run`."""
    compared = compare(_read(folder), _read(other))
    return Reported(
        text=compare_page(compared) if html else compare_markdown(compared),
        sentence=compared.headline,
        figures=compare_figures(compared),
    )
