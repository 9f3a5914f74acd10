"""Reads the rows of a prompt file, JSONL or parquet; bad rows are named by line. Knows no tokenizer
and no order (`source`)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from milescli.core.errors import DataError
from milescli.core.nearest import nearest
from milescli.rollout.tokenizer import Message

PROMPT_COLUMNS = ("prompt", "messages", "question", "problem", "input")
LABEL_COLUMNS = ("label", "answer", "solution", "target")
DEMONSTRATION_COLUMN = "demonstration"
NUM_BAD_ROWS_SHOWN = 5

PathField = Literal["prompts", "eval", "demonstrations", "train", "validation"]
"""The key under `data` that named the file."""

Record = tuple[int, dict[str, object] | str]
"""Line (or parquet row) counted from 1, and the row; or why it could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which columns are read."""

    prompt: str
    label: str | None
    demonstration: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """One good row, not yet tokenised."""

    index: int
    """Row in the file, counted from 0."""
    messages: list[Message]
    text: str
    """What the user wrote last."""
    label: str | None
    demonstration: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that cannot be used."""

    line: int
    """Counted from 1."""
    reason: str


def read_rows(
    path: Path,
    *,
    field: PathField,
    prompt_key: str | None,
    label_key: str | None,
    system_prompt: str | None,
    needs_label: bool,
) -> tuple[Columns, list[DataRow]]:
    """All rows of the file, in order.

    Raises DataError where columns are ambiguous or absent, and where any row is bad, naming the
    first few by line.
    """
    records = list(read_records(path))
    names = next((list(row) for _, row in records if isinstance(row, dict)), [])
    if not records:
        raise DataError(
            f"{path} is empty",
            why="it holds no row",
            fix=f"--set data.{field}=FILE   # a file with at least one prompt",
        )
    columns = (
        _columns(
            names,
            path,
            field=field,
            prompt_key=prompt_key,
            label_key=label_key,
            needs_label=needs_label,
        )
        if names
        else None
    )
    rows: list[DataRow] = []
    bad: list[BadRow] = []
    for line, record in records:
        if columns is None or isinstance(record, str):
            bad.append(BadRow(line=line, reason=str(record)))
            continue
        row = _row(record, line, columns=columns, field=field, system_prompt=system_prompt)
        rows.append(row) if isinstance(row, DataRow) else bad.append(row)
    if bad or columns is None:
        raise bad_rows_error(
            f"{len(bad)} of {len(records)} rows of {path} cannot be used", path, bad
        )
    return columns, rows


def read_records(path: Path) -> Iterator[Record]:
    """Every row of a file that `source.check_file` lets pass. Raises DataError where it is none."""
    return _jsonl(path) if path.suffix == ".jsonl" else _parquet(path)


def bad_rows_error(
    what: str, path: Path, bad: list[BadRow], *, fixes: Sequence[str] = ()
) -> DataError:
    """`what`, with the first few of the bad rows as the reason and a look at the first as the
    fix."""
    unit = "line" if path.suffix == ".jsonl" else "row"
    shown = "; ".join(f"{unit} {row.line}: {row.reason}" for row in bad[:NUM_BAD_ROWS_SHOWN])
    more = f"; and {len(bad) - NUM_BAD_ROWS_SHOWN} more" if len(bad) > NUM_BAD_ROWS_SHOWN else ""
    look = (
        f"sed -n {bad[0].line}p {path}"
        if path.suffix == ".jsonl"
        else f"mend row {bad[0].line} of {path}"
    )
    return DataError(what, why=shown + more, fix=[f"{look}   # mend or remove these rows", *fixes])


def sha256_of(path: Path) -> str:
    """Of the file's bytes, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _jsonl(path: Path) -> Iterator[Record]:
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    for number, raw in enumerate(lines, start=1):
        yield number, _parse_line(raw)


def _parse_line(raw: bytes) -> dict[str, object] | str:
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte {error.start + 1} of the line)"
    except json.JSONDecodeError as error:
        return (
            f"not JSON ({error.msg} at character {error.pos + 1})"
            if raw.strip()
            else "an empty line"
        )
    except RecursionError:
        return "JSON nested too deeply"
    return value if isinstance(value, dict) else f"a JSON object is wanted, not {_kind(value)}"


def _parquet(path: Path) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"cannot read {path}",
            why=f"not a parquet file: {str(error).splitlines()[0]}",
            fix=f"head -c 100 {path}   # what is it?",
        ) from error
    number = 0
    for batch in table.to_batches():
        for row in batch.to_pylist():
            number += 1
            yield number, row


def _columns(
    names: list[str],
    path: Path,
    *,
    field: PathField,
    prompt_key: str | None,
    label_key: str | None,
    needs_label: bool,
) -> Columns:
    prompt = _column(
        names, path, wanted=prompt_key, known=PROMPT_COLUMNS, key="prompt_key", required=True
    )
    demonstration = DEMONSTRATION_COLUMN if DEMONSTRATION_COLUMN in names else None
    label_required = needs_label or (
        field == "demonstrations" and demonstration is None and prompt != "messages"
    )
    label = _column(
        names, path, wanted=label_key, known=LABEL_COLUMNS, key="label_key", required=label_required
    )
    assert prompt is not None, names
    return Columns(prompt=prompt, label=label, demonstration=demonstration)


def _column(
    names: list[str],
    path: Path,
    *,
    wanted: str | None,
    known: tuple[str, ...],
    key: str,
    required: bool,
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
    if likely:
        raise DataError(
            f"which column of {path} is the {role}?",
            why=f"{' and '.join(likely)} are both there; {there}",
            fix=[f"--set data.{key}={name}" for name in likely],
        )
    if not required:
        return None
    guess = names[0] if role == "prompt" else names[-1]
    raise DataError(
        f"{path} has no {role} column",
        why=f"none of {', '.join(known)} is there; {there}",
        fix=f"--set data.{key}={guess}",
    )


def _row(
    record: dict[str, object],
    line: int,
    *,
    columns: Columns,
    field: PathField,
    system_prompt: str | None,
) -> DataRow | BadRow:
    try:
        messages = _messages(record, columns.prompt)
        label = None if columns.label is None else _text_of(record, columns.label)
        demonstration = _demonstration(record, columns, label=label, messages=messages, field=field)
    except ValueError as error:
        return BadRow(line=line, reason=str(error))
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    text = next(
        (message["content"] for message in reversed(messages) if message["role"] == "user"),
        messages[-1]["content"],
    )
    return DataRow(
        index=line - 1, messages=messages, text=text, label=label, demonstration=demonstration
    )


def _messages(record: dict[str, object], key: str) -> list[Message]:
    """The prompt as chat messages. Raises ValueError with the reason."""
    value = _present(record, key)
    if isinstance(value, str):
        return [{"role": "user", "content": _nonempty(value, f"`{key}`")}]
    if not isinstance(value, list):
        raise ValueError(f"`{key}` must be text or a list of messages, not {_kind(value)}")
    if not value:
        raise ValueError(f"`{key}` is an empty list")
    return [_message(item, f"`{key}[{place}]`") for place, item in enumerate(value)]


def _message(value: object, where: str) -> Message:
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("role"), str)
        or not isinstance(value.get("content"), str)
    ):
        raise ValueError(f"{where} must be a message with `role` and `content` as text")
    return {
        "role": _nonempty(value["role"], f"{where}.role"),
        "content": _nonempty(value["content"], f"{where}.content"),
    }


def _demonstration(
    record: dict[str, object],
    columns: Columns,
    *,
    label: str | None,
    messages: list[Message],
    field: PathField,
) -> str | None:
    """The worked response: its own column; else the assistant's last message; else a label that is
    one (`... #### 72`).

    Takes the assistant's last message off `messages`. Raises ValueError with the reason.
    """
    last = None
    if messages[-1]["role"] == "assistant":
        last = messages.pop()["content"]
        if field != "demonstrations":
            raise ValueError(
                f"`{columns.prompt}` ends with the assistant's message; a prompt ends with the "
                "user's turn"
            )
        if not messages:
            raise ValueError(f"`{columns.prompt}` holds nothing but the assistant's message")
    if columns.demonstration is not None:
        return _text_of(record, columns.demonstration)
    if last is not None:
        return last
    if field == "demonstrations" and label is None:
        raise ValueError(
            f"no worked response: `{columns.prompt}` does not end with an assistant's message"
        )
    return label if label is not None and (field == "demonstrations" or "####" in label) else None


def _text_of(record: dict[str, object], key: str) -> str:
    """A text or a number as text. Raises ValueError with the reason."""
    value = _present(record, key)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"`{key}` is {value}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"`{key}` must be text or a number, not {_kind(value)}")
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)  # a parquet column of integers with a gap is a column of floats
    return _nonempty(str(value), f"`{key}`")


def _present(record: dict[str, object], key: str) -> object:
    if key not in record:
        raise ValueError(f"`{key}` is missing")
    if record[key] is None:
        raise ValueError(f"`{key}` is null")
    return record[key]


def _nonempty(text: str, where: str) -> str:
    if not text.strip():
        raise ValueError(f"{where} is empty")
    if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        raise ValueError(f"{where} holds half of a surrogate pair, which is not text")
    return text


def _kind(value: object) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
