"""Rows that are learned from, as `miles data check` tells of them: what is in each file, and what a
run would take of it. Called by `data_check`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from milescli.core.types import Pair, Trajectory
from milescli.recipe.data import Data
from milescli.recipe.data_files import names_in
from milescli.rollout.example_rows import CHOSEN, REJECTED, Kind, RowField, RowForm
from milescli.rollout.examples import ReadFile, read_file
from milescli.rollout.source import file_named
from milescli.rollout.tables.base import LINE_SUFFIXES
from milescli.rollout.tokenizer import ChatTokenizer
from milescli.runtime.data_look import NUM_SHOWN, FileLook, Rendered


def look_at_rows(data: Data, key: RowField, *, kind: Kind) -> list[FileLook]:
    """Of each file that `data.<key>` names. Raises DataError for what is no file of such rows; bad
    rows are told."""
    looks = []
    for name in names_in(getattr(data, key)):
        file = file_named(name, key=f"data.{key}")
        read = read_file(file, data=data, key=key, kind=kind)
        num_duplicates, duplicates = _duplicates(read)
        form = read.form or RowForm()
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


def _learned(form: RowForm) -> str | None:
    return f"{CHOSEN}, {REJECTED}" if form.sides else form.chat or form.text or form.response


def _duplicates(read: ReadFile) -> tuple[int, list[tuple[int, int]]]:
    """How many rows an earlier one is equal to; and of the first, its line and that of the earlier
    one."""
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
    """The first of those that are learned from, token by token; of a pair each side."""
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
