"""Names that a request gives -> files within a run's folder, and nowhere else. The one place that
turns what was asked for into a path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from milescli.web.refusals import Forbidden, NotFound


def below(folder: Path, name: str) -> Path:
    """What `name`, as `a/b`, stands for below a folder. Raises Forbidden for one that climbs."""
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise _elsewhere(name)
    return folder.joinpath(*parts)


def file_within(folder: Path, name: str) -> Path:
    """A regular file below a folder, links resolved. Raises NotFound where there is none, Forbidden
    where it is somewhere else or not ours to read."""
    try:
        root, file = folder.resolve(), below(folder, name).resolve()
        if root not in file.parents:
            raise _elsewhere(name)
        if not file.is_file():
            raise NotFound(
                f"there is no file `{name[:200]}`",
                why=f"it is not in {folder}",
                fix=f"ls {folder}   # what is there",
            )
    except (OSError, RuntimeError) as error:  # a link to itself, a name too long, not ours
        raise Forbidden(
            f"`{name[:200]}` cannot be read",
            why=f"{type(error).__name__}: {error}",
            fix=f"ls -l {folder}",
        ) from None
    return file


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Raises Forbidden where the file cannot be read within."""
    try:
        yield
    except OSError as error:
        raise Forbidden(
            f"{file} cannot be read",
            why=f"{type(error).__name__}: {error}",
            fix=f"ls -l {file}   # whose is it?",
        ) from None


def _elsewhere(name: str) -> Forbidden:
    return Forbidden(
        f"`{name[:200]}` is not in the run's folder",
        why="the page reads what is within a run's folder, links resolved",
        fix="ask for a file that the page lists",
    )
