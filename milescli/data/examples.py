"""Loads and tokenises the rows of `data.train` and `data.validation`: chats with their loss masks,
or pairs. Bad rows are reported by line; order and position are defined as for prompts."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

from milescli.core.errors import DataError
from milescli.core.files import sha256_of
from milescli.core.types import Pair, Trajectory
from milescli.data.chat_masks import (
    MarkedText,
    marked_chat,
    marked_response,
    marked_text,
    tokenized,
)
from milescli.data.example_limits import ExampleReport, fitted
from milescli.data.example_rows import (
    Chat,
    ExampleRow,
    Kind,
    RowField,
    RowForm,
    form_of,
    read_row,
)
from milescli.data.file_prompts import epoch_order
from milescli.data.prompt_source import file_named
from milescli.data.rows import BadRow, bad_rows_error
from milescli.data.tables import LINE_SUFFIXES, Table, check_file
from milescli.data.tokenizer import ChatTokenizer
from milescli.data.trajectories import up_to_last
from milescli.recipe.data import Data
from milescli.recipe.data_files import DataFile, names_in

Item = TypeVar("Item")
"""Trajectory or Pair."""


class Examples(Generic[Item]):
    """Rows in an order fixed by (seed, epoch). Its position is its whole state."""

    def __init__(self, items: Sequence[Item], *, seed: int, shuffle: bool) -> None:
        """`items` in file order, at least one."""
        assert items, "a source without rows"
        self.items = items
        self._seed, self._shuffle = seed, shuffle
        self.position = 0
        """Rows taken since the start of the run, over all epochs."""
        self._epoch = -1
        self._order: array[int] = array("q")

    def __len__(self) -> int:
        """Rows per epoch."""
        return len(self.items)

    def first(self, count: int) -> list[Item]:
        """Those that the first `count` positions of a run take, each once."""
        if count >= len(self.items):
            return list(self.items)
        order = epoch_order(len(self.items), seed=self._seed, epoch=0, shuffle=self._shuffle)
        return [self.items[index] for index in order[:count]]

    def take(self, count: int) -> list[Item]:
        """The next `count` rows; moves the position. May cross epochs."""
        taken = []
        for position in range(self.position, self.position + count):
            epoch, offset = divmod(position, len(self.items))
            if epoch != self._epoch:
                self._order = epoch_order(
                    len(self.items), seed=self._seed, epoch=epoch, shuffle=self._shuffle
                )
                self._epoch = epoch
            taken.append(self.items[self._order[offset]])
        self.position += count
        return taken


def load_examples(
    data: Data,
    key: RowField,
    *,
    kind: Kind,
    tokenizer: ChatTokenizer,
    ends_at_turn: bool = False,
) -> tuple[list[Trajectory] | list[Pair], ExampleReport]:
    """Read, check and tokenise what `data.<key>` names, by absolute paths. `ends_at_turn`: what
    templates write after the token that ends the last turn is left out, as no engine would sample
    it: a reward model scores what was sampled.

    Raises DataError for a file that is missing or of another kind, for bad rows, and where nothing
    is left to learn from.
    """
    named = [file_named(name, key=f"data.{key}") for name in names_in(getattr(data, key))]
    pairs: list[Pair] = []
    places: list[str] = []
    hashes: list[str] = []
    for file in named:
        path = Path(file.name)
        read = read_examples(file, data=data, key=key, kind=kind)
        if read.problem is not None:
            raise read.problem
        made = _tokenised(read.rows, tokenizer, path=path, ends_at_turn=ends_at_turn)
        unit = "line" if path.suffix in LINE_SUFFIXES else "row"
        whose = f"{path.name} {unit}" if named[1:] else unit
        places += [f"{whose} {pair.index + 1}" for pair in made]
        pairs += [replace(pair, index=len(pairs) + number) for number, pair in enumerate(made)]
        hashes.append(sha256_of(path) + file.rows)
    several = len(named) > 1 or bool(named[0].rows)
    sha256 = hashlib.sha256("\n".join(hashes).encode()).hexdigest() if several else hashes[0]
    kept, report = fitted(
        pairs,
        data=data,
        key=key,
        places=places,
        path=", ".join(file.spelled() for file in named),
        sha256=sha256,
    )
    if kind == "pairs":
        return kept, report
    return [side for pair in kept for side in pair.sides], report


def _tokenised(
    rows: Sequence[ExampleRow], tokenizer: ChatTokenizer, *, path: Path, ends_at_turn: bool
) -> list[Pair]:
    sides = [side for row in rows for side in (row.chosen, row.rejected) if side is not None]
    lines = tokenized(tokenizer, _marked(rows, sides, tokenizer, path=path))
    if ends_at_turn:
        lines = [up_to_last(line, tokenizer.eos_id) for line in lines]
    trajectories = iter(lines)
    return [
        Pair(
            index=row.index,
            chosen=next(trajectories) if row.chosen is not None else None,
            rejected=next(trajectories) if row.rejected is not None else None,
            margin=row.margin,
        )
        for row in rows
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFile:
    """The rows of one file, not yet tokenised."""

    path: Path
    columns: list[str]
    """All that its first row has."""
    form: RowForm | None
    """None: no row has any."""
    rows: list[ExampleRow]
    """The good ones."""
    bad: list[BadRow]
    num_rows: int

    @property
    def problem(self) -> DataError | None:
        """For which a run would refuse it."""
        return _unusable(self.path, self.bad, self.num_rows) if self.bad else None


def read_examples(file: DataFile, *, data: Data, key: RowField, kind: Kind) -> ReadFile:
    """What `data.<key>` names. Raises DataError where it is missing, empty, or of another kind."""
    path = Path(file.name)
    check_file(path, field=key)
    records = list(islice(Table(path).records(), file.start, file.stop))
    names = next((list(row) for _, row in records if isinstance(row, dict)), [])
    if not records:
        raise DataError(
            f"{path} is empty" if not file.rows else f"{path} has no row {file.start}",
            why="it holds no row" if not file.rows else f"`{file.rows}` begins behind its end",
            fix=f"--set data.{key}=FILE   # a file with at least one row",
        )
    form = form_of(names, path, kind=kind, data=data, key=key) if names else None
    rows: list[ExampleRow] = []
    bad: list[BadRow] = []
    for line, record in records:
        if form is None or isinstance(record, str):
            bad.append(BadRow(line=line, reason=str(record)))
            continue
        try:
            rows.append(read_row(record, line - 1, form, data=data))
        except ValueError as error:
            bad.append(BadRow(line=line, reason=str(error)))
    return ReadFile(path=path, columns=names, form=form, rows=rows, bad=bad, num_rows=len(records))


def _unusable(path: Path, bad: list[BadRow], num_rows: int) -> DataError:
    return bad_rows_error(f"{len(bad)} of {num_rows} rows of {path} cannot be used", path, bad)


def _marked(
    rows: Sequence[ExampleRow], sides: Sequence[Chat], tokenizer: ChatTokenizer, *, path: Path
) -> list[MarkedText]:
    marked: list[MarkedText] = []
    bad: list[BadRow] = []
    lines = [row.index + 1 for row in rows for side in (row.chosen, row.rejected) if side]
    for line, side in zip(lines, sides, strict=True):
        try:
            marked.append(_text_of(side, tokenizer))
            if not marked[-1].spans:
                raise ValueError("nothing of it is learned: its last turn has no text")
        except Exception as error:  # a chat template may raise anything
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            bad.append(BadRow(line=line, reason=f"{kind}{error}"))
    if bad:
        raise _unusable(path, bad, len(rows))
    return marked


def _text_of(chat: Chat, tokenizer: ChatTokenizer) -> MarkedText:
    if not chat.turns:
        return marked_text(chat.text)
    if tokenizer.template is None:
        if chat.first + 1 != len(chat.turns) and len(chat.turns) > 2 + (
            chat.turns[0]["role"] == "system"
        ):
            raise ValueError("a chat of several turns needs a chat template (data.chat_template)")
        return marked_response(tokenizer.render(chat.turns[:-1]), chat.turns[-1]["content"])
    return marked_chat(tokenizer, chat.turns, first=chat.first, tools=chat.tools or None)
