"""Reads rows of data files: finds the columns, and returns each row's prompt (messages or tokens)
and label; bad rows are reported by line. Independent of the format (`tables`), of the tokenizer and
of the order (`prompt_source`)."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from itertools import islice
from pathlib import Path
from typing import Literal

from milescli.core.errors import DataError, nearest
from milescli.data.chat_turns import TOOLS_COLUMN, Tools, Turns, tools_in, turns_in, with_system
from milescli.data.tables import Record, Table, open_table
from milescli.data.tables.base import LINE_SUFFIXES
from milescli.data.tables.json_lines import kind_of

__all__ = ["BadRow", "Columns", "PathField", "Record", "bad_rows_error", "read_rows"]

NUM_BAD_ROWS_SHOWN = 5
MAX_BAD_ROWS = 1000
"""Kept to be told; more are counted."""
_Asked = Turns | tuple[int, ...]
"""A prompt: a chat, or the tokens that the model reads."""
Demonstration = str | Turns | None
"""A worked response: its text, or its turns where it calls tools; None: the row has none."""
TICK_ROWS = 4096
"""So many rows are read between two words on how far it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """One good row, not yet tokenised."""

    index: int
    """Row in the file, counted from 0."""
    messages: Turns
    """Empty: the prompt is `token_ids`."""
    text: str
    """What the user wrote last; empty where only tokens are known."""
    label: str | None
    demonstration: Demonstration
    token_ids: Sequence[int] = ()
    """Where the row holds them instead of text: what the model reads, whole."""
    tools: Tools = dataclass_field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that cannot be used."""

    line: int
    """Counted from 1."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """What is wanted of each row."""

    field: PathField
    prompt_key: str | None = None
    label_key: str | None = None
    """None: found by name."""
    system_prompt: str | None = None
    needs_label: bool | None = True
    """The reward compares with a label."""
    max_tokens: int | None = None
    """Prompts of more are not used, and of how many more is all the same."""


@dataclass(slots=True, kw_only=True)
class Scan:
    """What one pass over the rows of a file came to."""

    columns: Columns | None = None
    """None where no row could be read."""
    num_rows: int = 0
    last_line: int = 0
    """Of those rows, counted from 1."""
    rows: list[DataRow] | None = dataclass_field(default_factory=list)
    """The good ones; None where there are more than were to be kept."""
    prompt_hashes: array[int] = dataclass_field(default_factory=lambda: array("q"))
    """[good rows] equal for equal prompts, within this process."""
    label_hashes: array[int] = dataclass_field(default_factory=lambda: array("q"))
    """[good rows] the same of labels."""
    num_demonstrations: int = 0
    num_bad: int = 0
    bad: list[BadRow] = dataclass_field(default_factory=list)
    """The first of them."""

    def add_bad(self, line: int, reason: str) -> None:
        """Count it, and keep it where there are few."""
        self.num_bad += 1
        if self.num_bad <= MAX_BAD_ROWS:
            self.bad.append(BadRow(line=line, reason=reason))


def read_rows(
    path: Path,
    *,
    field: PathField,
    prompt_key: str | None,
    label_key: str | None,
    system_prompt: str | None,
    needs_label: bool | None,
) -> tuple[Columns, list[DataRow]]:
    """All rows of the file, in order.

    Raises DataError where columns are ambiguous or absent, and where any row is bad, naming the
    first few by line.
    """
    form = RowForm(
        field=field,
        prompt_key=prompt_key,
        label_key=label_key,
        system_prompt=system_prompt,
        needs_label=needs_label,
    )
    scan = scan_rows(open_table(path), form)
    columns = require_good(scan, path, field=field)
    assert scan.rows is not None, "all rows are kept"
    return columns, scan.rows


def scan_rows(
    table: Table,
    form: RowForm,
    *,
    start: int = 0,
    stop: int | None = None,
    most: int | None = None,
    tick: Callable[[int], None] | None = None,
) -> Scan:
    """Look at each row from `start` to `stop` once. `most`: of a file with more good rows none is
    kept; `tick` is told now and then how many rows were read.

    Raises DataError where columns are ambiguous or absent, or the file cannot be read.
    """
    scan, columns, field = Scan(), None, form.field
    prompt_hashes, label_hashes = scan.prompt_hashes, scan.label_hashes
    for line, record in islice(table.records(), start, stop):
        scan.num_rows += 1
        scan.last_line = line
        if tick is not None and not scan.num_rows % TICK_ROWS:
            tick(scan.num_rows)
        if isinstance(record, str):
            scan.add_bad(line, record)
            continue
        if columns is None:
            columns = scan.columns = find_columns(
                list(record),
                table.path,
                field=field,
                prompt_key=form.prompt_key,
                label_key=form.label_key,
                needs_label=form.needs_label,
            )
        if columns.tools is None and record.get(TOOLS_COLUMN) is not None:
            columns = scan.columns = replace(columns, tools=TOOLS_COLUMN)
        try:
            asked, tools, label, demonstration = _parts(record, columns, field=field)
        except ValueError as error:
            scan.add_bad(line, str(error))
            continue
        prompt_hashes.append(_hash_of(asked, tools))
        label_hashes.append(hash(label))
        scan.num_demonstrations += demonstration is not None
        if scan.rows is not None:
            scan.rows.append(
                _data_row(asked, tools, label, demonstration, line=line, system=form.system_prompt)
            )
            if most is not None and len(scan.rows) > most:
                scan.rows = None
    return scan


def require_good(scan: Scan, path: Path, *, field: PathField) -> Columns:
    """Raises DataError where no row is there, or any is bad."""
    if not scan.num_rows:
        raise DataError(
            f"{path} is empty",
            why="it holds no row",
            fix=f"--set data.{field}=FILE   # a file with at least one prompt",
        )
    if scan.num_bad or scan.columns is None:
        what = f"{scan.num_bad} of {scan.num_rows} rows of {path} cannot be used"
        raise bad_rows_error(what, path, scan.bad, num_bad=scan.num_bad)
    return scan.columns


def row_of(record: Record, columns: Columns, form: RowForm) -> DataRow | BadRow:
    """One record as a row."""
    line, value = record
    if isinstance(value, str):
        return BadRow(line=line, reason=value)
    try:
        parts = _parts(value, columns, field=form.field)
    except ValueError as error:
        return BadRow(line=line, reason=str(error))
    return _data_row(*parts, line=line, system=form.system_prompt)


def bad_rows_error(
    what: str,
    path: Path,
    bad: list[BadRow],
    *,
    fixes: Sequence[str] = (),
    num_bad: int | None = None,
) -> DataError:
    """`what`, with the first few of the bad rows as the reason and a look at the first as the
    fix. `num_bad`: where `bad` are not all."""
    unit = "line" if path.suffix in LINE_SUFFIXES else "row"
    num_more = (len(bad) if num_bad is None else num_bad) - NUM_BAD_ROWS_SHOWN
    shown = "; ".join(f"{unit} {row.line}: {row.reason}" for row in bad[:NUM_BAD_ROWS_SHOWN])
    more = f"; and {num_more} more" if num_more > 0 else ""
    look = (
        f"sed -n {bad[0].line}p {path}"
        if path.suffix in LINE_SUFFIXES
        else f"mend row {bad[0].line} of {path}"
    )
    return DataError(what, why=shown + more, fix=[f"{look}   # mend or remove these rows", *fixes])


def _parts(
    record: dict[str, object], columns: Columns, *, field: PathField
) -> tuple[_Asked, Tools, str | None, Demonstration]:
    """Prompt, tools, label and worked response. Raises ValueError with the reason."""
    asked = _asked(record, columns.prompt)
    tools = [] if columns.tools is None else tools_in(record)
    if tools and isinstance(asked, tuple):
        raise ValueError(f"`{columns.prompt}` is tokens, in which its `{columns.tools}` must stand")
    label = _label_of(record, columns)
    messages = [] if isinstance(asked, tuple) else asked
    demonstration = _demonstration(record, columns, label=label, messages=messages, field=field)
    return asked, tools, label, demonstration


def _data_row(
    asked: _Asked,
    tools: Tools,
    label: str | None,
    demonstration: Demonstration,
    *,
    line: int,
    system: str | None,
) -> DataRow:
    if isinstance(asked, tuple):
        return DataRow(
            index=line - 1,
            messages=[],
            text="",
            label=label,
            demonstration=demonstration,
            token_ids=asked,
        )
    messages = with_system(asked, system)
    text = next(
        (message["content"] for message in reversed(messages) if message["role"] == "user"),
        messages[-1]["content"],
    )
    return DataRow(
        index=line - 1,
        messages=messages,
        text=text,
        label=label,
        demonstration=demonstration,
        tools=tools,
    )


def _hash_of(asked: _Asked, tools: Tools) -> int:
    if isinstance(asked, tuple):
        return hash(asked)
    if len(asked) == 1 and asked[0]["role"] == "user" and not tools:
        return hash(asked[0]["content"])
    if not tools and not any("tool_calls" in message for message in asked):
        return hash(tuple((message["role"], message["content"]) for message in asked))
    return hash(json.dumps([asked, tools], sort_keys=True, default=str))


def _asked(record: dict[str, object], key: str) -> _Asked:
    """The prompt. Raises ValueError with the reason."""
    value = record.get(key)
    if type(value) is str:
        return [{"role": "user", "content": value if _is_plain(value) else _nonempty(value, key)}]
    value = _present(record, key)
    if not isinstance(value, list):
        raise ValueError(f"`{key}` must be text or a list of messages, not {kind_of(value)}")
    if value and type(value[0]) is int:
        if not all(type(token) is int and token >= 0 for token in value):
            raise ValueError(f"`{key}` must be token ids, whole numbers from 0, and nothing else")
        return tuple(value)
    return turns_in(value, key)


def _worked(record: dict[str, object], key: str) -> Demonstration:
    """A response, or the turns of one with tools, of which the assistant's is the last."""
    value = record.get(key)
    if not isinstance(value, list):
        return _text_of(record, key)
    turns = turns_in(value, key)
    if turns[-1]["role"] != "assistant":
        raise ValueError(f"`{key}` does not end with an assistant's message")
    return turns


def _demonstration(
    record: dict[str, object],
    columns: Columns,
    *,
    label: str | None,
    messages: Turns,
    field: PathField,
) -> Demonstration:
    """The worked response: its own column, a text or turns; else the assistant's last message;
    else a label that is one (`... #### 72`).

    Takes the assistant's last message off `messages`. Raises ValueError with the reason.
    """
    last = None
    if messages and messages[-1]["role"] == "assistant":
        last = messages.pop()["content"]
        if field != "demonstrations":
            raise ValueError(
                f"`{columns.prompt}` ends with the assistant's message; a prompt ends with the "
                "user's turn"
            )
        if not messages:
            raise ValueError(f"`{columns.prompt}` holds nothing but the assistant's message")
    if columns.demonstration is not None:
        return _worked(record, columns.demonstration)
    if last is not None:
        return last
    if field == "demonstrations" and label is None:
        raise ValueError(
            f"no worked response: `{columns.prompt}` does not end with an assistant's message"
        )
    return label if label is not None and (field == "demonstrations" or "####" in label) else None


def _label_of(record: dict[str, object], columns: Columns) -> str | None:
    """None: the row has none, and needs none. Raises ValueError with the reason."""
    if columns.label is None:
        return None
    if not columns.needs_label:
        # a gap is null, an empty text in CSV, and not a number in a column of floats
        value = record.get(columns.label)
        if value is None or value != value or (isinstance(value, str) and not value.strip()):
            return None
    return _text_of(record, columns.label)


def _text_of(record: dict[str, object], key: str) -> str:
    """A text or a number as text. Raises ValueError with the reason."""
    value = record.get(key)
    if type(value) is str:
        return value if _is_plain(value) else _nonempty(value, key)
    value = _present(record, key)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"`{key}` is {value}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"`{key}` must be text or a number, not {kind_of(value)}")
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)  # a parquet column of integers with a gap is a column of floats
    return _nonempty(str(value), key)


def _present(record: dict[str, object], key: str) -> object:
    if key not in record:
        raise ValueError(f"`{key}` is missing")
    if record[key] is None:
        raise ValueError(f"`{key}` is null")
    return record[key]


def _is_plain(text: str) -> bool:
    """Whether `_nonempty` has nothing against it, as for most texts; it is looked at millions of
    times."""
    return text.isascii() and not text.isspace() and text != ""


def _nonempty(text: str, where: str) -> str:
    if not text or text.isspace():
        raise ValueError(f"`{where}` is empty")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"`{where}` holds half of a surrogate pair, which is not text"
            ) from None
    return text


PROMPT_COLUMNS = ("prompt", "messages", "question", "problem", "input")
LABEL_COLUMNS = ("label", "answer", "solution", "target")
DEMONSTRATION_COLUMN = "demonstration"

PathField = Literal["prompts", "eval", "demonstrations", "train", "validation"]
"""The key under `data` that named the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which columns are read."""

    prompt: str
    label: str | None
    needs_label: bool
    """A row without one cannot be used."""
    demonstration: str | None
    tools: str | None = None
    """None: no row has any."""

    @property
    def names(self) -> list[str]:
        """All that are."""
        named = (self.prompt, self.label, self.demonstration, self.tools)
        return [name for name in named if name is not None]


def find_columns(
    names: list[str],
    path: Path,
    *,
    field: PathField,
    prompt_key: str | None,
    label_key: str | None,
    needs_label: bool | None,
) -> Columns:
    """Raises DataError where one is ambiguous, or is wanted and absent. `needs_label`: None where
    it is not known whether anybody looks at it."""
    prompt = _column(
        names, path, wanted=prompt_key, known=PROMPT_COLUMNS, key="prompt_key", is_needed=True
    )
    demonstration = DEMONSTRATION_COLUMN if DEMONSTRATION_COLUMN in names else None
    is_needed = needs_label
    if field == "demonstrations" and demonstration is None and prompt != "messages":
        is_needed = True
    label = _column(
        names, path, wanted=label_key, known=LABEL_COLUMNS, key="label_key", is_needed=is_needed
    )
    assert prompt is not None, names
    return Columns(
        prompt=prompt, label=label, needs_label=bool(is_needed), demonstration=demonstration
    )


def _column(
    names: list[str],
    path: Path,
    *,
    wanted: str | None,
    known: tuple[str, ...],
    key: str,
    is_needed: bool | None,
) -> str | None:
    role = key.removesuffix("_key")
    there = f"its columns are {', '.join(names)}"
    if wanted is not None:
        if wanted in names:
            return wanted
        guess = nearest(wanted, names) or names[0]
        raise DataError(
            f"{path} has no column `{wanted}`", why=there, fix=f"--set data.{key}={guess}"
        )
    likely = [name for name in known if name in names]
    if len(likely) == 1:
        return likely[0]
    if likely and is_needed is not False:
        raise DataError(
            f"which column of {path} is the {role}?",
            why=f"{' and '.join(likely)} are both there; {there}",
            fix=[f"--set data.{key}={name}" for name in likely],
        )
    if not is_needed:
        return None
    guess = names[0] if role == "prompt" else names[-1]
    raise DataError(
        f"{path} has no {role} column",
        why=f"none of {', '.join(known)} is there; {there}",
        fix=f"--set data.{key}={guess}",
    )
