"""One pass over each data file: columns, bad rows, repeated prompts, lengths; and prompts, or rows
to learn from, as the model would see them. Called by `data_check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from milescli.console.output import Output
from milescli.console.transfer import Transfer
from milescli.core.errors import DataError
from milescli.core.types import Pair, Prompt, Trajectory
from milescli.data.chat_masks import demonstrated
from milescli.data.example_rows import CHOSEN, REJECTED, Kind, RowField
from milescli.data.example_rows import RowForm as ExampleForm
from milescli.data.examples import ReadFile, read_examples
from milescli.data.file_rows import FileRows, evenly, read_file
from milescli.data.prompt_source import file_named, form_of
from milescli.data.rows import BadRow, RowForm
from milescli.data.tables import LINE_SUFFIXES, Table, check_file
from milescli.data.tokenizer import ChatTokenizer
from milescli.data.trajectories import unsampled
from milescli.recipe.agents import Role
from milescli.recipe.data import Data
from milescli.recipe.data_files import DataFile, names_in
from milescli.rollout.episode.roles import conversation_of, role_demonstrations

NUM_SHOWN = 5
NUM_MEASURED = 4096
"""Rows whose characters are counted, evenly spread."""


@dataclass(slots=True, kw_only=True)
class FileLook:
    """What one file holds, or some rows of it."""

    path: str
    columns: list[str]
    """All that its first row has."""
    prompt_key: str | None
    label_key: str | None
    num_rows: int
    num_bad: int
    bad: list[BadRow]
    """The first of them."""
    learned: str | None = None
    """Where rows are learned from: the columns that are; None: prompts."""
    num_duplicates: int = 0
    """Rows whose prompt an earlier row of the file has (learned ones: that are an earlier row); of
    prompts 0 where rows are bad."""
    duplicates: list[tuple[int, int]] = field(default_factory=list)
    """The first of them: its line, and that of the earlier row."""
    lengths: list[int] = field(default_factory=list)
    """Characters of what the user wrote, ascending, of some rows; empty where tokens are told."""
    unit: str = "line"
    """What rows are named by: line or row."""
    problem: DataError | None = None
    """The error with which a run would refuse the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """One prompt as the model sees it, token by token."""

    row: int
    """Its index; of rows that are learned from, among those that a run takes."""
    tokens: list[str]
    loss_mask: list[int]
    """[num_tokens] 1 where it is learned: a demonstration's response. What the policy will answer
    to a prompt is not there yet."""
    side: str = ""
    """Of a pair: chosen or rejected; of an episode of several roles: whose conversation it is."""


def look_at(
    data: Data,
    field: str,
    *,
    needs_label: bool | None,
    with_lengths: bool,
    folder: Path,
    output: Output,
) -> tuple[list[FileLook], list[FileRows]]:
    """Read each file that `data.<field>` names, and report bad rows. `folder`: where Arrow files
    are written. Raises DataError for what is no file of rows, or lacks the columns."""
    form = form_of(data, field, needs_label=needs_label)  # type: ignore[arg-type]
    looks, files, first_index = list[FileLook](), list[FileRows](), 0
    for name in names_in(getattr(data, field)):
        file = file_named(name, key=f"data.{field}")
        check_file(Path(file.name), field=field)
        table = Table(Path(file.name))
        names = next((list(row) for _, row in table.records() if isinstance(row, dict)), [])
        rows = _read(table, file, form, folder=folder, first_index=first_index, output=output)
        look = _look(rows, names)
        if look.problem is None:
            look.num_duplicates, look.duplicates = _duplicates(rows)
            if with_lengths:
                sample = rows.read(evenly(len(rows), NUM_MEASURED))
                look.lengths = sorted(len(row.text) for row in sample if row.messages)
        looks.append(look)
        files.append(rows)
        first_index += rows.last_line
    return looks, files


def _read(
    table: Table,
    file: DataFile,
    form: RowForm,
    *,
    folder: Path,
    first_index: int,
    output: Output,
) -> FileRows:
    size_bytes = table.path.stat().st_size
    label = f"looking at {file.spelled()}"
    with Transfer(output, label=label, total=size_bytes, tells_quick=False) as seen:
        return read_file(
            table,
            file,
            form,
            folder=folder,
            first_index=first_index,
            tick=lambda _: seen.reached(round(table.share_read * size_bytes)),
        )


def _look(rows: FileRows, names: list[str]) -> FileLook:
    problem = None
    try:
        rows.require_good()
    except DataError as error:
        problem = error
    return FileLook(
        path=rows.spelled,
        columns=names,
        prompt_key=rows.columns.prompt if rows.columns else None,
        label_key=rows.columns.label if rows.columns else None,
        num_rows=rows.num_rows,
        num_bad=rows.num_bad,
        bad=rows.bad,
        unit="line" if rows.path.suffix in LINE_SUFFIXES else "row",
        problem=problem,
    )


def _duplicates(rows: FileRows) -> tuple[int, list[tuple[int, int]]]:
    """Return how many rows repeat the prompt of an earlier row; and the first of them, its line and
    that of the earlier one."""
    import numpy as np

    hashes = rows.rows.hashes("prompt")
    _, firsts, groups = np.unique(hashes, return_index=True, return_inverse=True)
    earlier = firsts[groups]
    again = np.flatnonzero(earlier != np.arange(len(hashes)))
    pairs = [(int(place), int(earlier[place])) for place in again[:NUM_SHOWN]]
    places = sorted({place for pair in pairs for place in pair})
    lines = {place: row.index + 1 for place, row in zip(places, rows.read(places), strict=True)}
    return len(again), [(lines[place], lines[before]) for place, before in pairs]


def rendered(
    prompt: Prompt, tokenizer: ChatTokenizer, *, field: str, roles: Mapping[str, Role]
) -> list[Rendered]:
    """Render a prompt as text, token by token; a demonstration with its response. Of an episode of
    several `roles` what each sees; a prompt as the first does. Raises as `role_demonstrations`."""
    lines = {"": unsampled(prompt.token_ids, bytes(len(prompt.token_ids)))}
    worked = field == "demonstrations" and prompt.demonstration is not None
    if worked and roles:
        lines = role_demonstrations(prompt, tokenizer, roles=roles)
    elif worked:
        lines = {"": demonstrated(prompt, tokenizer)}
    elif roles:
        first = next(iter(roles))
        text = tokenizer.render(conversation_of(first, roles, prompt=prompt, turns=()))
        ids = list(tokenizer.inner(text, add_special_tokens=False)["input_ids"])
        lines = {first: unsampled(ids, bytes(len(ids)))}
    return [
        Rendered(
            row=prompt.index,
            tokens=tokenizer.pieces(line.token_ids.tolist()),
            loss_mask=list(line.loss_mask),
            side=side,
        )
        for side, line in lines.items()
    ]


def histogram(lengths: Sequence[int], *, most: int = 8) -> list[tuple[int, int, int]]:
    """Return (from, up to, how many) of at most so many equal ranges. `lengths` ascending."""
    least = lengths[0]
    width = (lengths[-1] - least) // most + 1
    counts = Counter((length - least) // width for length in lengths)
    return [
        (least + n * width, least + (n + 1) * width - 1, counts[n]) for n in range(max(counts) + 1)
    ]


def look_at_rows(data: Data, key: RowField, *, kind: Kind) -> list[FileLook]:
    """Look at each file of rows to learn from that `data.<key>` names. Raises DataError for a file
    that holds no such rows; reports bad rows."""
    looks = []
    for name in names_in(getattr(data, key)):
        file = file_named(name, key=f"data.{key}")
        read = read_examples(file, data=data, key=key, kind=kind)
        num_duplicates, duplicates = _duplicate_rows(read)
        form = read.form or ExampleForm()
        looks.append(
            FileLook(
                path=file.spelled(),
                columns=read.columns,
                prompt_key=form.chat or form.prompt,
                label_key=form.judged,
                learned=_learned(form),
                num_rows=read.num_rows,
                num_bad=len(read.bad),
                bad=read.bad,
                num_duplicates=num_duplicates,
                duplicates=duplicates,
                unit="line" if Path(file.name).suffix in LINE_SUFFIXES else "row",
                problem=read.problem,
            )
        )
    return looks


def _learned(form: ExampleForm) -> str | None:
    return f"{CHOSEN}, {REJECTED}" if form.sides else form.chat or form.text or form.response


def _duplicate_rows(read: ReadFile) -> tuple[int, list[tuple[int, int]]]:
    """Return how many rows equal an earlier one; and the first of them, its line and that of the
    earlier one."""
    first: dict[str, int] = {}
    again = []
    for row in read.rows:
        before = first.setdefault(repr((row.chosen, row.rejected)), row.index)
        if before != row.index:
            again.append((row.index + 1, before + 1))
    return len(again), again[:NUM_SHOWN]


def rendered_rows(
    rows: Sequence[Trajectory | Pair], tokenizer: ChatTokenizer
) -> Iterator[Rendered]:
    """Render the first rows that are learned from, token by token; of a pair each side."""
    for place, row in enumerate(rows[:NUM_SHOWN]):
        sides = {"": row} if isinstance(row, Trajectory) else _sides(row)
        for name, side in sides.items():
            yield Rendered(
                row=place,
                side=name,
                tokens=tokenizer.pieces(list(side.token_ids)),
                loss_mask=list(side.loss_mask),
            )


def _sides(pair: Pair) -> dict[str, Trajectory]:
    both = {CHOSEN: pair.chosen, REJECTED: pair.rejected}
    return {name: side for name, side in both.items() if side is not None}
