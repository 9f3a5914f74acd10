"""Reports what one data file contains, for `miles data check`: its layout, columns, bad and
repeated rows. `data_check` combines the reports of a recipe's files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from milescli.console.output import Output
from milescli.console.transfer import Transfer
from milescli.core.errors import DataError
from milescli.core.types import Image
from milescli.data.example_rows import ExampleRow, Kind, RowField
from milescli.data.examples import read_examples
from milescli.data.file_rows import FileRows, evenly_spread_places, read_file
from milescli.data.images import PromptImages
from milescli.data.layouts import Columns, find_layout
from milescli.data.prompt_source import parse_file_name
from milescli.data.rows import BadRow, DataRow, PromptRowParser
from milescli.data.tables import LINE_SUFFIXES, Table
from milescli.recipe.data import Data
from milescli.recipe.data_files import DataFile, names_in
from milescli.rollout.rewards.label_check import MAX_LABELS

NUM_SHOWN = 5
GAP_WORDS = frozenset(("null", "none", "nan", "na", "n/a", "nil", "<na>"))
"""Labels that other programs write for a missing value."""
NUM_MEASURED = 4096
"""Number of rows that are inspected, evenly spaced."""


@dataclass(slots=True, kw_only=True)
class FileReport:
    """Describes one file, or some rows of it."""

    path: str
    columns: list[str]
    """All columns of the first row."""
    prompt_key: str | None
    label_key: str | None
    num_rows: int
    num_bad: int
    bad: list[BadRow]
    """The first bad rows."""
    layout: str = ""
    """Name of the known layout of the first row; empty if it is unknown, so that columns are found
    by name."""
    reads: dict[str, str] = field(default_factory=dict)
    """Column that is read -> what it is."""
    learned: str | None = None
    """The columns that are learned from; None if the rows are prompts."""
    num_duplicates: int = 0
    """Rows that repeat the prompt of an earlier row, or, if they are learned from, the whole row. 0
    if any row of prompts is bad."""
    duplicates: list[tuple[int, int]] = field(default_factory=list)
    """(line of the row, line of the earlier one) of the first such rows."""
    lengths: list[int] = field(default_factory=list)
    """Number of characters of some prompts, ascending; empty if tokens are counted."""
    words: list[str] = field(default_factory=list)
    """Labels that other programs write for a missing value, as `NA`; they are read as texts."""
    unit: str = "line"
    """Unit that names a row: line or row."""
    has_images: bool = False
    """True if the inspected rows have images."""
    problem: DataError | None = None
    """The error with which a run would refuse the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReport:
    """Describes the measured images of a part's rows, as the model sees them."""

    num_rows: int
    """Rows that have images."""
    num_images: int
    num_different: int
    smallest: tuple[int, int]
    """Width and height in pixels of the one with the fewest pixels."""
    largest: tuple[int, int]
    tokens_min: int
    tokens_max: int
    tokens: int
    """Number of tokens of all images."""
    size_bytes: int
    """Bytes of the different images, as they are stored in memory."""


def report_images(rows: Iterable[Sequence[Image]]) -> ImageReport | None:
    """Return a report on the images of rows; None if there are none."""
    shown = [images for images in rows if images]
    every = [image for images in shown for image in images]
    if not every:
        return None
    by_size = sorted((image.width * image.height, image.width, image.height) for image in every)
    counts = [image.num_tokens for image in every]
    sizes = {image.sha256: len(image.png) for image in every}
    return ImageReport(
        num_rows=len(shown),
        num_images=len(every),
        num_different=len(sizes),
        smallest=by_size[0][1:],
        largest=by_size[-1][1:],
        tokens_min=min(counts),
        tokens_max=max(counts),
        tokens=sum(counts),
        size_bytes=sum(sizes.values()),
    )


def read_rows(
    table: Table,
    file: DataFile,
    form: PromptRowParser,
    *,
    folder: Path,
    first_index: int,
    output: Output,
) -> FileRows:
    """Read a file of prompts with a progress bar. Raises DataError as `read_file`."""
    size_bytes = table.path.stat().st_size
    label = f"reading {file.spelled()}"
    with Transfer(output, label=label, total=size_bytes, tells_quick=False) as progress:
        return read_file(
            table,
            file,
            form,
            folder=folder,
            first_index=first_index,
            tick=lambda _: progress.reached(round(table.share_read * size_bytes)),
        )


def report_unread_file(file: DataFile, first: dict[str, object], problem: DataError) -> FileReport:
    """Return a report on a file whose rows are not read."""
    return FileReport(
        path=file.spelled(),
        columns=list(first),
        prompt_key=None,
        label_key=None,
        num_rows=0,
        num_bad=0,
        bad=[],
        layout=find_layout(first).name,
        problem=problem,
    )


def report_file(rows: FileRows, first: dict[str, object]) -> FileReport:
    """Return a report on a file whose rows were read. `first`: its first row."""
    problem = None
    try:
        rows.require_good()
    except DataError as error:
        problem = error
    columns = rows.columns or Columns(path=rows.path)
    return FileReport(
        path=rows.spelled,
        columns=list(first),
        prompt_key=columns.chat or columns.prompt,
        label_key=columns.label or columns.judged,
        num_rows=rows.num_rows,
        num_bad=rows.num_bad,
        bad=rows.bad,
        layout=columns.layout.name,
        reads=columns.described(first),
        unit="line" if rows.path.suffix in LINE_SUFFIXES else "row",
        has_images=problem is None
        and any(
            _has_images(row) for row in rows.read(evenly_spread_places(len(rows), NUM_MEASURED))
        ),
        problem=problem,
    )


def _has_images(row: DataRow | ExampleRow) -> bool:
    sides = (row,) if isinstance(row, DataRow) else (row.chosen, row.rejected)
    return any(side is not None and side.images for side in sides)


def gap_words(rows: FileRows) -> list[str]:
    """Return the labels of the rows that are words for a missing value."""
    if rows.columns is None or rows.columns.label is None:
        return []
    labels = {row.label for row in rows.distinct_labels(MAX_LABELS)[0] if row.label is not None}
    return sorted(label for label in labels if label.strip().casefold() in GAP_WORDS)


def find_duplicates(rows: FileRows) -> tuple[int, list[tuple[int, int]]]:
    """Return the number of rows that repeat the prompt of an earlier row, and the first such pairs:
    (line of the row, line of the earlier one)."""
    import numpy as np

    hashes = rows.rows.hashes("key")
    _, firsts, groups = np.unique(hashes, return_index=True, return_inverse=True)
    earlier = firsts[groups]
    again = np.flatnonzero(earlier != np.arange(len(hashes)))
    pairs = [(int(place), int(earlier[place])) for place in again[:NUM_SHOWN]]
    places = sorted({place for pair in pairs for place in pair})
    lines = {place: row.index + 1 for place, row in zip(places, rows.read(places), strict=True)}
    return len(again), [(lines[place], lines[before]) for place, before in pairs]


def report_example_files(
    data: Data, key: RowField, *, kind: Kind, folder: Path, images: PromptImages | None = None
) -> list[FileReport]:
    """Return a report on each file of rows to train on that `data.<key>` names. `images`: how the
    model sees them. Raises DataError for a file without such rows; bad rows are only reported."""
    reports = []
    for name in names_in(getattr(data, key)):
        file = parse_file_name(name, key=f"data.{key}")
        try:
            rows = read_examples(file, data=data, key=key, kind=kind, folder=folder, images=images)
        except DataError as error:
            reports.append(report_unread_file(file, first_row(Table(Path(file.name))), error))
            continue
        columns = rows.columns or Columns(path=rows.path)
        look = report_file(rows, rows.first)
        look.num_duplicates, look.duplicates = find_duplicates(rows)
        sides = (columns.chosen or columns.chat, columns.rejected)
        learned = columns.chat or columns.text or columns.response or columns.calls
        look.learned = ", ".join(filter(None, sides)) if columns.rejected else learned
        if look.problem is None and columns.rejected:
            look.problem = _equal_sides(rows)
        reports.append(look)
    return reports


def _equal_sides(rows: FileRows) -> DataError | None:
    """Return the error that no pair of a small file has two different sides, as a run reports it;
    None if one has."""
    if len(rows) > NUM_MEASURED or any(
        row.chosen != row.rejected for row in rows.read(range(len(rows)))
    ):
        return None
    return DataError(
        f"no row of {rows.path} can be learned from",
        why=f"both sides are equal in all of its {len(rows)}",
        fix=f"--set data.{rows.form.field}=FILE   # with pairs whose sides differ",
    )


def first_row(table: Table) -> dict[str, object]:
    """Return the first row that can be read; empty if none can."""
    return next((row for _, row in table.records() if isinstance(row, dict)), {})
