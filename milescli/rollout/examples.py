"""The rows of `data.train` and `data.validation`, tokenised: chats with their loss masks, or pairs.
Bad rows are named by line; their order and position are those of prompts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from milescli.core.errors import DataError
from milescli.core.types import Pair, Trajectory
from milescli.recipe.data import Data
from milescli.rollout.chats import (
    MarkedText,
    marked_chat,
    marked_response,
    marked_text,
    tokenized,
)
from milescli.rollout.example_rows import Chat, ExampleRow, Kind, RowField, form_of, read_row
from milescli.rollout.rows import (
    NUM_BAD_ROWS_SHOWN,
    BadRow,
    bad_rows_error,
)
from milescli.rollout.source import check_file, epoch_order, percentile
from milescli.rollout.tables import open_table, sha256_of
from milescli.rollout.tokenizer import ChatTokenizer
from milescli.rollout.trajectories import cut, up_to_last

Item = TypeVar("Item")
"""Trajectory or Pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleReport:
    """What is in the file; for the manifest and for people."""

    path: str
    sha256: str
    """Of the file's bytes."""
    num_rows: int
    """Rows in the file."""
    num_used: int
    num_too_long: int
    """Left out, being longer than `data.max_row_tokens`."""
    num_cut: int
    """Cut at that length."""
    num_equal: int
    """Pairs left out whose sides are equal."""
    tokens: int
    """Of all rows that are used."""
    loss_tokens: int
    """Of these, learned ones."""
    tokens_p50: int
    """Over all rows, the longer side of a pair."""
    tokens_p90: int
    tokens_p99: int
    tokens_max: int
    note: str = ""
    """Which rows were left out, the first of them by line."""


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
    """Read, check and tokenise the file `data.<key>`, an absolute path. `ends_at_turn`: what
    templates write after the token that ends the last turn is left out, as no engine would sample
    it: a reward model scores what was sampled.

    Raises DataError for a file that is missing or of another kind, for bad rows, and where nothing
    is left to learn from.
    """
    path = Path(str(getattr(data, key)))
    check_file(path, field=key)
    rows = _read(path, data=data, key=key, kind=kind)
    sides = [side for row in rows for side in (row.chosen, row.rejected) if side is not None]
    marked = _marked(rows, sides, tokenizer, path=path)
    lines = tokenized(tokenizer, marked)
    if ends_at_turn:
        lines = [up_to_last(line, tokenizer.eos_id) for line in lines]
    trajectories = iter(lines)
    pairs = [
        Pair(
            index=row.index,
            chosen=next(trajectories) if row.chosen is not None else None,
            rejected=next(trajectories) if row.rejected is not None else None,
            margin=row.margin,
        )
        for row in rows
    ]
    kept, report = _fitted(pairs, data=data, path=path, key=key)
    if kind == "pairs":
        return kept, report
    return [side for pair in kept for side in pair.sides], report


def _read(path: Path, *, data: Data, key: RowField, kind: Kind) -> list[ExampleRow]:
    records = list(open_table(path).records())
    names = next((list(row) for _, row in records if isinstance(row, dict)), [])
    if not records:
        raise DataError(
            f"{path} is empty",
            why="it holds no row",
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
    if bad:
        raise _unusable(path, bad, len(records))
    return rows


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


def _fitted(
    pairs: list[Pair], *, data: Data, path: Path, key: RowField
) -> tuple[list[Pair], ExampleReport]:
    """Those that are learned from, and the report on all."""
    bound = data.max_row_tokens
    lengths = sorted(pair.num_tokens for pair in pairs)
    long = [
        BadRow(line=p.index + 1, reason=f"{p.num_tokens} tokens")
        for p in pairs
        if p.num_tokens > bound
    ]
    if long and data.long_rows == "error":
        raise _too_long(path, long, pairs, bound)
    num_cut = 0
    if data.long_rows == "truncate":
        num_cut, pairs_now = len(long), [_cut(pair, bound) for pair in pairs]
        long = [
            BadRow(line=pair.index + 1, reason=f"nothing learned in its first {bound} tokens")
            for pair in pairs_now
            if not all(side.num_loss_tokens for side in pair.sides)
        ]
        num_cut -= len(long)
    else:
        pairs_now = pairs
    lines = {row.line for row in long}
    equal = [
        BadRow(line=pair.index + 1, reason="both sides are equal")
        for pair in pairs_now
        if pair.index + 1 not in lines and _is_equal(pair)
    ]
    left_out = lines | {row.line for row in equal}
    kept = [pair for pair in pairs_now if pair.index + 1 not in left_out]
    if not kept:
        if long:
            raise _too_long(path, long, pairs, bound)
        raise bad_rows_error(f"no row of {path} teaches anything", path, equal)
    sides = [side for pair in kept for side in pair.sides]
    return kept, ExampleReport(
        path=str(path),
        sha256=sha256_of(path),
        num_rows=len(pairs),
        num_used=len(kept),
        num_too_long=len(long),
        num_cut=num_cut,
        num_equal=len(equal),
        tokens=sum(side.num_tokens for side in sides),
        loss_tokens=sum(side.num_loss_tokens for side in sides),
        tokens_p50=percentile(lengths, 50),
        tokens_p90=percentile(lengths, 90),
        tokens_p99=percentile(lengths, 99),
        tokens_max=lengths[-1],
        note=_left_out(path, key, [*long, *equal], len(pairs)),
    )


def _cut(pair: Pair, bound: int) -> Pair:
    return replace(
        pair,
        chosen=pair.chosen and cut(pair.chosen, bound),
        rejected=pair.rejected and cut(pair.rejected, bound),
    )


def _is_equal(pair: Pair) -> bool:
    return (
        pair.chosen is not None
        and pair.rejected is not None
        and pair.chosen.token_ids == pair.rejected.token_ids
    )


def _left_out(path: Path, key: RowField, rows: list[BadRow], num_rows: int) -> str:
    if not rows:
        return ""
    rows = sorted(rows, key=lambda row: row.line)
    shown = "; ".join(f"row {row.line}: {row.reason}" for row in rows[:NUM_BAD_ROWS_SHOWN])
    return f"data.{key}: {len(rows)} of {num_rows} rows of {path.name} are left out ({shown}" + (
        f"; and {len(rows) - NUM_BAD_ROWS_SHOWN} more)" if len(rows) > NUM_BAD_ROWS_SHOWN else ")"
    )


def _too_long(path: Path, long: list[BadRow], pairs: list[Pair], bound: int) -> DataError:
    longest = max(pair.num_tokens for pair in pairs)
    shown = "; ".join(f"row {row.line}: {row.reason}" for row in long[:NUM_BAD_ROWS_SHOWN])
    return DataError(
        f"{len(long)} of {len(pairs)} rows of {path} are longer than {bound} tokens",
        why=f"{shown}; the longest has {longest}",
        fix=[f"--set data.max_row_tokens={longest}", "--set data.long_rows=truncate"],
    )
