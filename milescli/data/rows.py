"""Parses rows of prompts: finds the columns of a file, and the prompt (messages or tokens), label,
tools and worked response of each row. It knows no file format, tokenizer or order."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from milescli.core.errors import DataError, nearest
from milescli.data.tables import LINE_SUFFIXES, kind_of

Turns = list[dict[str, Any]]
"""`role` and `content`, both text, and what else a template takes: `tool_calls`, `name`, ..."""
Tools = list[dict[str, Any]]
"""JSON schemas of the tools that the model may call."""
TOOLS_COLUMN = "tools"
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "observation": "tool"}
"""Role names of ShareGPT's form (`from` and `value`) -> those of chat templates."""
NUM_BAD_ROWS_SHOWN = 5
Demonstration = str | Turns | None
"""A worked response: its text, or its turns if it calls tools; None if the row has none."""
_Prompt = Turns | tuple[int, ...]
"""A chat, or the tokens that the model reads."""


class DataRow(NamedTuple):
    """One good row, not yet tokenised."""

    index: int
    """Row in the file, counted from 0."""
    messages: Turns
    """The chat; empty if the prompt is `token_ids`."""
    text: str
    """The last message of the user; empty if the prompt is `token_ids`."""
    label: str | None
    demonstration: Demonstration
    token_ids: Sequence[int]
    """The whole prompt of a row that holds tokens instead of text."""
    tools: Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """Describes an unusable row."""

    line: int
    """Counted from 1."""
    reason: str


class Parsed(NamedTuple):
    """A good row, and what is counted and compared without reading it again."""

    row: tuple[Any, ...]
    """A named tuple, whose class the form states."""
    key_hash: int
    """Equal for equal prompts, or for equal rows to learn from, within this process."""
    label_hash: int
    is_worked: bool
    """Whether the row has a worked response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """What a source of prompts needs from each row."""

    row_class = DataRow

    field: PathField
    prompt_key: str | None = None
    """None: the column is found by its name."""
    label_key: str | None = None
    system_prompt: str | None = None
    needs_label: bool | None = True
    """Whether the reward compares with a label; None if that is not known."""
    max_tokens: int | None = None
    """Longer prompts are not used, so the tokeniser may stop behind this length."""

    def find(self, names: Sequence[str], path: Path) -> Columns:
        """Find the columns by `names`, those of the first row. Raises DataError if one is
        ambiguous, or is needed and absent."""
        prompt = _column(
            names, path, wanted=self.prompt_key, known=PROMPT_COLUMNS, key="prompt_key", needed=True
        )
        demonstration = DEMONSTRATION_COLUMN if DEMONSTRATION_COLUMN in names else None
        needed = self.needs_label
        if self.field == "demonstrations" and demonstration is None and prompt != "messages":
            needed = True
        label = _column(
            names, path, wanted=self.label_key, known=LABEL_COLUMNS, key="label_key", needed=needed
        )
        assert prompt is not None, names
        return Columns(
            prompt=prompt, label=label, needs_label=bool(needed), demonstration=demonstration
        )

    def parse(self, record: Mapping[str, Any], line: int, columns: Columns) -> Parsed:
        """Return the row on `line`. Raises ValueError with the reason if it cannot be used."""
        prompt, tools = _prompt(record, columns.prompt), tools_in(record)
        if tools and isinstance(prompt, tuple):
            raise ValueError(
                f"`{columns.prompt}` is tokens, in which its `{TOOLS_COLUMN}` must stand"
            )
        label = _label_of(record, columns)
        messages: Turns = [] if isinstance(prompt, tuple) else prompt
        worked = _demonstration(record, columns, label=label, messages=messages, field=self.field)
        prompt_hash = _hash_of(prompt, tools)
        text, token_ids = "", prompt if isinstance(prompt, tuple) else ()
        if messages:
            messages = with_system(messages, self.system_prompt)
            text = messages[-1]["content"]
            if messages[-1]["role"] != "user":
                of_user = (turn["content"] for turn in reversed(messages) if turn["role"] == "user")
                text = next(of_user, text)
        row = DataRow(line - 1, messages, text, label, worked, token_ids, tools)
        return Parsed(row, prompt_hash, hash(label), worked is not None)


def bad_rows_error(
    what: str,
    path: Path,
    bad: list[BadRow],
    *,
    fixes: Sequence[str] = (),
    num_bad: int | None = None,
) -> DataError:
    """Make the error `what`, with the first few bad rows as its reason and a command that shows the
    first one as its fix. `num_bad`: number of bad rows, if `bad` are not all."""
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


def _hash_of(prompt: _Prompt, tools: Tools) -> int:
    if isinstance(prompt, tuple):
        return hash(prompt)
    if len(prompt) == 1 and prompt[0]["role"] == "user" and not tools:
        return hash(prompt[0]["content"])
    if not tools and not any("tool_calls" in message for message in prompt):
        return hash(tuple((message["role"], message["content"]) for message in prompt))
    return hash(json.dumps([prompt, tools], sort_keys=True, default=str))


def _prompt(record: Mapping[str, object], key: str) -> _Prompt:
    value = record.get(key)
    if type(value) is str:
        return [{"role": "user", "content": value if _is_plain(value) else _nonempty(value, key)}]
    value = present(record, key)
    if not isinstance(value, list):
        raise ValueError(f"`{key}` must be text or a list of messages, not {kind_of(value)}")
    if value and type(value[0]) is int:
        if not all(type(token) is int and token >= 0 for token in value):
            raise ValueError(f"`{key}` must be token ids, whole numbers from 0, and nothing else")
        return tuple(value)
    return turns_in(value, key)


def _worked(record: Mapping[str, object], key: str) -> Demonstration:
    """Return a response, or the turns of one that calls tools, which end with the assistant's."""
    value = record.get(key)
    if not isinstance(value, list):
        return _text_of(record, key)
    turns = turns_in(value, key)
    if turns[-1]["role"] != "assistant":
        raise ValueError(f"`{key}` does not end with an assistant's message")
    return turns


def _demonstration(
    record: Mapping[str, object],
    columns: Columns,
    *,
    label: str | None,
    messages: Turns,
    field: PathField,
) -> Demonstration:
    """Return the worked response: its own column, a text or turns; else the assistant's last
    message, which is removed from `messages`; else a label that is one (`... #### 72`)."""
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


def _label_of(record: Mapping[str, object], columns: Columns) -> str | None:
    """Return the label; None if the row has none and needs none."""
    if columns.label is None:
        return None
    if not columns.needs_label:
        # a gap is null, an empty text in CSV, and not a number in a column of floats
        value = record.get(columns.label)
        if value is None or value != value or (isinstance(value, str) and not value.strip()):
            return None
    return _text_of(record, columns.label)


def _text_of(record: Mapping[str, object], key: str) -> str:
    """Return a text, or a number as text."""
    value = record.get(key)
    if type(value) is str:
        return value if _is_plain(value) else _nonempty(value, key)
    value = present(record, key)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"`{key}` is {value}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"`{key}` must be text or a number, not {kind_of(value)}")
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)  # a parquet column of integers with a gap is a column of floats
    return _nonempty(str(value), key)


def present(record: Mapping[str, Any], key: str) -> Any:
    """Return a value. Raises ValueError if the row has none."""
    if key not in record:
        raise ValueError(f"`{key}` is missing")
    if record[key] is None:
        raise ValueError(f"`{key}` is null")
    return record[key]


def _is_plain(text: str) -> bool:
    """Return whether `_nonempty` would accept the text: a quick test that most of millions pass."""
    return text.isascii() and not text.isspace() and text != ""


def _nonempty(text: str, where: str) -> str:
    if not text or text.isspace():
        raise ValueError(f"`{where}` is empty")
    require_text(text, f"`{where}`")
    return text


def turns_in(value: list[object], key: str) -> Turns:
    """Parse the list of turns in column `key`. Raises ValueError with the reason."""
    if not value:
        raise ValueError(f"`{key}` is an empty list")
    return [turn_of(item, f"`{key}[{place}]`") for place, item in enumerate(value)]


def turn_of(value: object, where: str) -> dict[str, Any]:
    """Parse one message, in OpenAI's form or in ShareGPT's, to one with text as its content. Raises
    ValueError with the reason."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a message with `role` and `content`")
    if "from" in value and "value" in value:
        role = str(value["from"])
        value = {"role": _ROLES.get(role, role), "content": value["value"]}
    role = value.get("role")
    if not isinstance(role, str) or not role.strip():
        raise ValueError(f"{where} has no `role`")
    # parquet has all keys in all rows: those without a value are not there
    turn = {key: item for key, item in value.items() if item is not None}
    content = turn["content"] = _content(turn.get("content", ""), where)
    if not content.strip() and not turn.get("tool_calls"):
        raise ValueError(f"{where}.content is empty")
    return turn


def _content(content: object, where: str) -> str:
    """Return the text of a message: a text, or OpenAI's list of parts that are text."""
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}.content holds a part that is no text")
        content = "".join(map(str, texts))
    if not isinstance(content, str):
        raise ValueError(f"{where}.content must be text, not {type(content).__name__}")
    require_text(content, f"{where}.content")
    return content


def tools_in(record: Mapping[str, Any]) -> Tools:
    """Parse a row's column `tools`, a list or its JSON; empty without one. Raises ValueError with
    the reason."""
    value = record.get(TOOLS_COLUMN)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"`{TOOLS_COLUMN}` is not JSON: {error.msg}") from None
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError(f"`{TOOLS_COLUMN}` must be a list of tools")
    return value


def with_system(turns: Turns, system_prompt: str | None) -> Turns:
    """Return the turns after the recipe's system prompt, unless they have one of their own."""
    if system_prompt is None or (turns and turns[0]["role"] == "system"):
        return turns
    return [{"role": "system", "content": system_prompt}, *turns]


def require_text(text: str, where: str) -> None:
    """Raise ValueError for a text that cannot be written as UTF-8."""
    if not text.isascii() and any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        raise ValueError(f"{where} holds half of a surrogate pair, which is not text")


PROMPT_COLUMNS = ("prompt", "messages", "question", "problem", "input")
LABEL_COLUMNS = ("label", "answer", "solution", "target")
DEMONSTRATION_COLUMN = "demonstration"

PathField = Literal["prompts", "eval", "demonstrations", "train", "validation"]
"""The key under `data` that named the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The names of the columns that are read."""

    prompt: str
    label: str | None
    needs_label: bool
    """Whether a row without a label is bad."""
    demonstration: str | None


def _column(
    names: Sequence[str],
    path: Path,
    *,
    wanted: str | None,
    known: tuple[str, ...],
    key: str,
    needed: bool | None,
) -> str | None:
    role = key.removesuffix("_key")
    there = f"its columns are {', '.join(names)}"
    if wanted is not None:
        return require_column(wanted, names, path, key=key)
    likely = [name for name in known if name in names]
    if len(likely) == 1:
        return likely[0]
    if likely and needed is not False:
        raise DataError(
            f"which column of {path} is the {role}?",
            why=f"{' and '.join(likely)} are both there; {there}",
            fix=[f"--set data.{key}={name}" for name in likely],
        )
    if not needed:
        return None
    guess = names[0] if role == "prompt" else names[-1]
    raise DataError(
        f"{path} has no {role} column",
        why=f"none of {', '.join(known)} is there; {there}",
        fix=f"--set data.{key}={guess}",
    )


def require_column(wanted: str, names: Sequence[str], path: Path, *, key: str) -> str:
    """Return the column `wanted`, which `data.<key>` names. Raises DataError if it is absent."""
    if wanted in names:
        return wanted
    guess = nearest(wanted, names) or names[0]
    raise DataError(
        f"{path} has no column `{wanted}`",
        why=f"its columns are {', '.join(names)}",
        fix=f"--set data.{key}={guess}",
    )
