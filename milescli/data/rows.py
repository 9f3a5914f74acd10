"""Parses rows of prompts: finds the columns of a file, and the prompt (messages or tokens), label,
tools and worked response of each row. It knows no file format, tokenizer or order."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NamedTuple

from milescli.core.errors import DataError
from milescli.data.choices import letter_of, options_in, with_options
from milescli.data.images import COLUMNS as IMAGE_COLUMNS
from milescli.data.images import MARK, PromptImages, Source, sources_in, with_marks
from milescli.data.layouts import (
    LABEL_COLUMNS,
    NO_EXTRA_COLUMNS,
    PROMPT_COLUMNS,
    Columns,
    ExtraColumns,
    find_column,
    find_layout,
    no_column,
    require_text_label,
)
from milescli.data.messages import (
    Images,
    Tools,
    Turns,
    as_chat,
    history_in,
    is_chat,
    is_dialogue,
    parsed,
    present,
    require_text,
    tools_in,
    turns_in,
    value_at,
    with_system,
    without_foreign_arguments,
)
from milescli.data.tables import LINE_SUFFIXES, kind_of

DEMONSTRATION_COLUMN = "demonstration"
NUM_BAD_ROWS_SHOWN = 5
Demonstration = str | Turns | None
"""A worked response: its text, or its turns if it calls tools; None if the row has none."""
_Prompt = Turns | tuple[int, ...]
"""A chat, or the tokens that the model reads."""


class DataRow(NamedTuple):
    """Holds one valid row, not yet tokenised."""

    index: int
    """Row in the file, counted from 0."""
    messages: Turns
    """The chat; empty if the prompt is `token_ids`."""
    text: str
    """The last message of the user; empty if the prompt is `token_ids`."""
    label: str | None
    demonstration: Demonstration
    token_ids: Sequence[int]
    """The whole prompt of a row that has tokens instead of text."""
    tools: Tools
    images: tuple[Source, ...] = ()
    """Images of the prompt, in the order of their marks."""
    worked_images: tuple[Source, ...] = ()
    """Images of the turns of `demonstration`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """Describes an unusable row."""

    line: int
    """Counted from 1."""
    reason: str


class Parsed(NamedTuple):
    """Holds a valid row, and what is counted and compared without reading the row again."""

    row: tuple[Any, ...]
    """A named tuple, whose class the form states."""
    key_hash: int
    """Equal for equal prompts, or for equal rows to train on, within this process."""
    label_hash: int
    has_demonstration: bool
    """True if the row has a worked response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRowParser:
    """Parses the rows of one file as prompts, by the settings of a recipe."""

    row_class = DataRow

    field: PathField
    prompt_key: str | None = None
    """None: the column is found by its name."""
    label_key: str | None = None
    system_prompt: str | None = None
    needs_label: bool | None = True
    """True if the reward compares with a label; None if that is unknown."""
    max_tokens: int | None = None
    """Longer prompts are not used, so the tokeniser may stop after this length."""
    ignored: frozenset[str] = frozenset()
    """Columns to ignore, though they look like part of the prompt."""
    is_raw: bool = False
    """True if a prompt is used as raw text, including a dialogue in one text."""
    images: PromptImages | None = None
    """How the model sees images; None: it sees none."""

    def find(self, record: Mapping[str, Any], path: Path) -> Columns:
        """Find the columns by the first row, whose layout may be a known one. Raises DataError if a
        column is ambiguous, or is needed and absent."""
        layout = find_layout(record)
        stated = layout.reads
        prompt = find_column(
            record,
            path,
            key="prompt_key",
            wanted=self.prompt_key,
            stated=stated.get("prompt"),
            known=PROMPT_COLUMNS,
            ignored=self.ignored,
        )
        if prompt is None:
            raise no_column(record, path, key="prompt_key", known=PROMPT_COLUMNS)
        demonstration = DEMONSTRATION_COLUMN if DEMONSTRATION_COLUMN in record else None
        needed = self.needs_label
        if self.field == "demonstrations" and demonstration is None:
            value = value_at(record, prompt)
            needed = needed or not is_chat(parsed(value) if isinstance(value, str) else value)
        label = None
        if self.label_key is not None or stated.get("label") is not None or needed is not False:
            label = find_column(
                record,
                path,
                key="label_key",
                wanted=self.label_key,
                stated=stated.get("label"),
                known=LABEL_COLUMNS,
                ignored=self.ignored | {prompt},
            )
        else:
            likely = [name for name in LABEL_COLUMNS if name in record and name != prompt]
            label = likely[0] if len(likely) == 1 else None
        if label is None and needed:
            raise no_column(
                record, path, key="label_key", known=LABEL_COLUMNS, taken=(prompt, demonstration)
            )
        if label is not None:
            require_text_label(label, record, path)
        choices = tuple(stated.get("choices", "").split())
        return Columns(
            path=path,
            layout=layout,
            prompt=prompt,
            label=label,
            needs_label=bool(needed),
            demonstration=demonstration,
            ignored=self.ignored,
            is_prompt_given=self.prompt_key is not None,
            choices=() if self.ignored.intersection(choices) else choices,
            sees_images=self.images is not None,
        )

    def parse(self, record: Mapping[str, Any], line: int, columns: Columns) -> Parsed:
        """Return the row on `line`. Raises ValueError with the reason if it cannot be used, and
        DataError if a column that looks like part of the prompt would be ignored."""
        assert columns.prompt is not None, columns
        given: Images = [] if self.images is not None else None
        prompt = _prompt(record, columns.prompt, is_raw=self.is_raw, images=given)
        tools: Tools = []
        extra = columns.known.get(tuple(record)) or columns.extra_columns(record)
        if extra is not NO_EXTRA_COLUMNS:
            prompt, tools = with_extra_columns(prompt, record, columns, extra)
        if columns.choices:
            prompt, label = _with_options(prompt, record, columns)
        else:
            label = _label_of(record, columns)
        messages: Turns = [] if isinstance(prompt, tuple) else prompt
        worked = _demonstration(
            record, columns, label=label, messages=messages, field=self.field, images=given
        )
        images: tuple[Source, ...] = ()
        num_asked = 0
        if self.images is not None:
            turns = [*messages, *worked] if messages and isinstance(worked, list) else messages
            turns, images = with_image_marks(turns, given or [], record, columns, self.images)
            messages, answer = turns[: len(messages)], turns[len(messages) :]
            worked = answer or worked
            num_asked = sum(turn["content"].count(MARK) for turn in messages) if images else 0
            prompt = prompt if isinstance(prompt, tuple) else messages
        shown, worked_images = images[:num_asked], images[num_asked:]
        prompt_hash = hash((_hash_of(prompt, tools), shown)) if shown else _hash_of(prompt, tools)
        text, token_ids = "", prompt if isinstance(prompt, tuple) else ()
        if messages:
            messages = with_system(messages, self.system_prompt)
            text = messages[-1]["content"]
            if messages[-1]["role"] != "user":
                of_user = (turn["content"] for turn in reversed(messages) if turn["role"] == "user")
                text = next(of_user, text)
        row = DataRow(
            line - 1, messages, text, label, worked, token_ids, tools, shown, worked_images
        )
        return Parsed(row, prompt_hash, hash(label), worked is not None)


def _with_options(
    prompt: _Prompt, record: Mapping[str, Any], columns: Columns
) -> tuple[_Prompt, str | None]:
    """Return the prompt with the options below its last message, and the letter of the right
    option. Raises ValueError."""
    options = options_in(record, columns.choices, answer=columns.label)
    if isinstance(prompt, tuple):
        raise ValueError(
            f"`{columns.prompt}` contains tokens, but the options must be inserted as text"
        )
    last = prompt[-1]
    prompt = [*prompt[:-1], {**last, "content": with_options(last["content"], options[1])}]
    if _label_of(record, columns) is None:
        return prompt, None
    assert columns.label is not None, "a label without a column"
    answer, first = value_at(record, columns.label), columns.layout.first_choice
    return prompt, letter_of(answer, options, key=columns.label, first=first)


def with_image_marks(
    turns: Turns,
    given: list[Source | None],
    record: Mapping[str, Any],
    columns: Columns,
    reads: PromptImages,
) -> tuple[Turns, tuple[Source, ...]]:
    """Return the turns of a row with a mark for each image, and the images, each read once as a
    check. `given`: the images within its messages. Raises ValueError with the reason."""
    name = columns.extra_columns(record).images
    listed = sources_in(record[name]) if name is not None else []
    if not turns:
        if listed:
            raise ValueError(f"`{columns.prompt}` contains tokens, but `{name}` contains images")
        return turns, ()
    is_left_out = not columns.ignored.isdisjoint(IMAGE_COLUMNS)
    turns, images = with_marks(turns, given, listed, may_lack=is_left_out)
    for image in images:
        reads.check(image, base=columns.path.parent)
    return turns, images


def with_extra_columns(
    prompt: _Prompt, record: Mapping[str, Any], columns: Columns, extra: ExtraColumns
) -> tuple[_Prompt, Tools]:
    """Return the prompt with its further columns (the text that it is about, earlier turns, the
    system turn), and the tools. Raises as `PromptRowParser.parse`."""
    tools = tools_in(record, extra.tools) if extra.tools is not None else []
    around = (extra.system, extra.context, extra.history)
    if isinstance(prompt, tuple):
        if tools or any(name is not None and value_at(record, name) for name in around):
            name = extra.tools if tools else next(name for name in around if name is not None)
            raise ValueError(
                f"`{columns.prompt}` contains tokens, but its `{name}` must be inserted as text"
            )
        columns.require_all_read(record, extra.unread, [])
        return prompt, []
    turns = prompt
    if extra.context is not None and (text := _extra_text(record, extra.context)):
        last = turns[-1]
        turns = [*turns[:-1], {**last, "content": f"{last['content']}\n\n{text}"}]
    if extra.history is not None and (before := value_at(record, extra.history)):
        turns = [*history_in(before, extra.history), *turns]
    if extra.system is not None:
        turns = with_own_system(turns, record, extra.system)
    if tools:
        turns = without_foreign_arguments(turns, tools)
    columns.require_all_read(record, extra.unread, turns)
    return turns, tools


def with_own_system(turns: Turns, record: Mapping[str, Any], key: str) -> Turns:
    """Return the turns with the system turn in column `key` before them. Raises ValueError if they
    have a different one."""
    text = _extra_text(record, key)
    if not text:
        return turns
    if turns and turns[0]["role"] in ("system", "developer"):
        if turns[0]["content"].strip() != text.strip():
            raise ValueError(f"`{key}` sets a system prompt, but the first message is another one")
        return turns
    return [{"role": "system", "content": text}, *turns]


def _extra_text(record: Mapping[str, Any], key: str) -> str:
    """Return the text in a further column of the prompt; empty if the row has none."""
    value = value_at(record, key)
    if isinstance(value, dict) and "parts" in value:  # Gemini's system instruction
        value = value["parts"]
    if isinstance(value, list) and value and isinstance(value[0], dict):  # parts of a text
        value = turns_in([{"role": "system", "content": value}], key)[0]["content"]
    if value is None or value != value or (isinstance(value, str) and not value.strip()):
        return ""
    if not isinstance(value, str):
        raise ValueError(f"`{key}` must be text, not {kind_of(value)}")
    require_text(value, f"`{key}`")
    return value


def bad_rows_error(
    what: str,
    path: Path,
    bad: list[BadRow],
    *,
    fixes: Sequence[str] = (),
    num_bad: int | None = None,
) -> DataError:
    """Return the error `what`, with the first few bad rows as its reason and a command that shows
    the first of them as its fix. `num_bad`: number of bad rows, if `bad` does not hold all."""
    unit = "line" if path.suffix in LINE_SUFFIXES else "row"
    num_more = (len(bad) if num_bad is None else num_bad) - NUM_BAD_ROWS_SHOWN
    shown = "; ".join(f"{unit} {row.line}: {row.reason}" for row in bad[:NUM_BAD_ROWS_SHOWN])
    more = f"; and {num_more} more" if num_more > 0 else ""
    look = (
        f"sed -n {bad[0].line}p {shlex.quote(str(path))}"
        if path.suffix in LINE_SUFFIXES
        else f"miles data check {shlex.quote(f'{path}[{bad[0].line - 1}:{bad[0].line}]')}"
    )
    return DataError(what, why=shown + more, fix=[f"{look}   # fix or remove these rows", *fixes])


def _hash_of(prompt: _Prompt, tools: Tools) -> int:
    if isinstance(prompt, tuple):
        return hash(prompt)
    if len(prompt) == 1 and prompt[0]["role"] == "user" and not tools:
        return hash(prompt[0]["content"])
    if not tools and not any("tool_calls" in message for message in prompt):
        return hash(tuple((message["role"], message["content"]) for message in prompt))
    return hash(json.dumps([prompt, tools], sort_keys=True, default=str))


_OPENERS = frozenset("[\nH")
"""First characters of texts that may contain a chat: as JSON, or with the markers of HH."""


def _prompt(
    record: Mapping[str, object], key: str, *, is_raw: bool, images: Images = None
) -> _Prompt:
    value = record.get(key)
    if value is None:
        value = present(record, key)
    if type(value) is str:
        may_be_chat = value[:1] in _OPENERS and not (is_raw and is_dialogue(value))
        if may_be_chat and (chat := as_chat(value, key, images)) is not None:
            return chat
        return [{"role": "user", "content": value if _is_plain(value) else _nonempty(value, key)}]
    if not isinstance(value, list):
        raise ValueError(f"`{key}` must be text or a list of messages, not {kind_of(value)}")
    if value and type(value[0]) is int:
        if not all(type(token) is int and token >= 0 for token in value):
            raise ValueError(f"`{key}` must contain only token ids, whole numbers from 0")
        return tuple(value)
    return turns_in(value, key, images)


def _worked_response(record: Mapping[str, object], key: str, images: Images) -> Demonstration:
    """Return the response in column `key`: a text, or the turns of one that calls tools, which end
    with the assistant's."""
    value = record.get(key)
    if not isinstance(value, list):
        return _text_of(record, key)
    turns = turns_in(value, key, images)
    if turns[-1]["role"] != "assistant":
        raise ValueError(f"`{key}` does not end with an assistant's message")
    return turns


_OTHER_TURN_FIELDS = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""What the assistant writes in a turn besides the content."""


def _demonstration(
    record: Mapping[str, object],
    columns: Columns,
    *,
    label: str | None,
    messages: Turns,
    field: PathField,
    images: Images,
) -> Demonstration:
    """Return the worked response: its own column, a text or turns; else the assistant's last
    message, which is removed from `messages`; else a label that is one (`... #### 72`)."""
    last: Demonstration = None
    if messages and messages[-1]["role"] == "assistant":
        turn = messages.pop()
        last = [turn] if any(turn.get(name) for name in _OTHER_TURN_FIELDS) else turn["content"]
        if field != "demonstrations":
            raise ValueError(
                f"`{columns.prompt}` ends with the assistant's message, but a prompt must end "
                "with the user's turn"
            )
        if not messages:
            raise ValueError(f"`{columns.prompt}` contains only the assistant's message")
    if columns.demonstration is not None:
        return _worked_response(record, columns.demonstration, images)
    if last is not None:
        return last
    if field == "demonstrations" and label is None:
        raise ValueError(
            f"there is no worked response: `{columns.prompt}` does not end with an assistant's "
            "message"
        )
    return label if label is not None and (field == "demonstrations" or "####" in label) else None


def _label_of(record: Mapping[str, object], columns: Columns) -> str | None:
    """Return the label; None if the row has none and needs none."""
    if columns.label is None:
        return None
    if not columns.needs_label:
        # a gap is null, an empty text in CSV, and not a number in a column of floats
        value = value_at(record, columns.label)
        if value is None or value != value or (isinstance(value, str) and not value.strip()):
            return None
    return _text_of(record, columns.label)


def _text_of(record: Mapping[str, object], key: str) -> str:
    """Return a text, or a number as text; for a list of one item, that of the item."""
    value = record.get(key)
    if type(value) is str:
        return value if _is_plain(value) else _nonempty(value, key)
    value = present(record, key)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"`{key}` is {value}")
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise ValueError(f"`{key}` must be text or a number, not {_kind_of_label(value, key)}")
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)  # a parquet column of integers with a gap is a column of floats
    if isinstance(value, Decimal):  # each has as many places as its column
        text = f"{value:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return _nonempty(str(value), key)


def _kind_of_label(value: object, key: str) -> str:
    """Name the kind of a label that is no text."""
    if isinstance(value, list) and len(value) > 1:
        return f"a list of {len(value)} (a reward that takes several reads them as JSON in a text)"
    if isinstance(value, dict) and value:
        return f"an object (its fields have names such as `{key}.{next(iter(value))}`)"
    return kind_of(value)


def _is_plain(text: str) -> bool:
    """Return True if `_nonempty` would accept the text: a quick test, as most of millions of texts
    pass it."""
    return text.isascii() and not text.isspace() and text != ""


def _nonempty(text: str, where: str) -> str:
    if not text or text.isspace():
        raise ValueError(f"`{where}` is empty")
    require_text(text, f"`{where}`")
    return text


PathField = Literal["prompts", "eval", "demonstrations", "train", "validation"]
"""Key below `data` that named the file."""
