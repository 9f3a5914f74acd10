"""Parses rows to learn from as text: finds the columns, and the chat, text or pair in each row.
`examples` tokenises them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from milescli.core.errors import DataError
from milescli.data.rows import (
    Parsed,
    Tools,
    Turns,
    present,
    require_column,
    require_text,
    tools_in,
    turns_in,
    with_system,
)
from milescli.recipe.data import Data

Kind = Literal["chats", "pairs"]
"""What an objective learns from: supervised from chats (or texts), preference and reward_model from
pairs."""
RowField = Literal["train", "validation"]
"""The key under `data` that named the file."""

CHAT_COLUMNS = ("messages", "conversations", "conversation")
PROMPT_COLUMNS = ("prompt", "question", "instruction", "problem", "input")
RESPONSE_COLUMNS = ("completion", "response", "output", "demonstration", "answer")
INSTRUCTION_COLUMN, CONTEXT_COLUMN = "instruction", "input"
"""Alpaca's form: the text that an instruction is about, if any, has a column of its own."""
TEXT_COLUMN, MARGIN_COLUMN, JUDGED_COLUMN = "text", "margin", "label"
CHOSEN, REJECTED = "chosen", "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleColumns:
    """The columns that are read: exactly one of `chat`, `text`, `response` and the two sides."""

    prompt: str | None = None
    context: str | None = None
    """A column whose text follows the prompt as a paragraph of its own."""
    chat: str | None = None
    text: str | None = None
    response: str | None = None
    judged: str | None = None
    """A column that states whether the response is good (KTO)."""
    sides: bool = False


class Chat(NamedTuple):
    """The text that is learned from a row."""

    turns: Turns
    """Empty if the row is plain `text`."""
    first: int = 0
    """Number of the turn from which on turns of the assistant are learned."""
    tools: Sequence[Mapping[str, Any]] = ()
    text: str = ""


class ExampleRow(NamedTuple):
    """One good row, not yet tokenised."""

    index: int
    """Row in the file, counted from 0."""
    chosen: Chat | None
    """The chosen side of a pair; the chat itself if the row is no pair."""
    rejected: Chat | None = None
    margin: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleForm:
    """What is needed of each row to learn from."""

    row_class = ExampleRow
    field: RowField
    kind: Kind
    data: Data

    def find(self, names: Sequence[str], path: Path) -> ExampleColumns:
        """Find the columns by `names`, those of the first row. Raises DataError if they are not
        clear."""
        data = self.data
        there = f"its columns are {', '.join(names)}"

        def named(wanted: str | None, known: Sequence[str], option: str) -> str | None:
            if wanted is None:
                return next((name for name in known if name in names), None)
            return require_column(wanted, names, path, key=option)

        prompt = named(data.prompt_key, PROMPT_COLUMNS, "prompt_key")
        response = named(data.response_key, RESPONSE_COLUMNS, "response_key")
        has_context = prompt == INSTRUCTION_COLUMN and {CONTEXT_COLUMN} <= {*names} - {response}
        context = CONTEXT_COLUMN if has_context and data.prompt_key is None else None
        if self.kind == "pairs":
            if CHOSEN in names and REJECTED in names:
                return ExampleColumns(prompt=prompt, context=context, sides=True)
            if prompt and response and JUDGED_COLUMN in names:
                return ExampleColumns(
                    prompt=prompt, context=context, response=response, judged=JUDGED_COLUMN
                )
            raise DataError(
                f"{path} holds no pairs",
                why=f"a pair has the columns `{CHOSEN}` and `{REJECTED}` (and `prompt`, where "
                f"these do not begin with it); a response that was judged alone has "
                f"`{JUDGED_COLUMN}`, true or false; {there}",
                fix=f"--set data.{self.field}=FILE.jsonl   # with these columns",
            )
        chat = next((name for name in CHAT_COLUMNS if name in names), None)
        if chat and data.response_key is None:
            return ExampleColumns(chat=chat)
        if prompt and response and prompt != response:
            return ExampleColumns(prompt=prompt, context=context, response=response)
        if TEXT_COLUMN in names:
            return ExampleColumns(text=TEXT_COLUMN)
        lacks = "response" if prompt else "prompt"
        raise DataError(
            f"what is learned from {path}?",
            why=f"a row holds a chat (`messages`), a prompt and a response, or a `{TEXT_COLUMN}`; "
            f"there is no {lacks} column: {there}",
            fix=f"--set data.{lacks}_key={names[-1] if lacks == 'response' else names[0]}",
        )

    def parse(self, record: Mapping[str, Any], line: int, columns: ExampleColumns) -> Parsed:
        """Return the row on `line`. Raises ValueError with the reason if it cannot be used."""
        row = _row_of(record, line - 1, columns, data=self.data)
        return Parsed(row, hash(repr(row[1:3])), 0, False)


def _row_of(
    record: Mapping[str, Any], index: int, form: ExampleColumns, *, data: Data
) -> ExampleRow:
    tools = tools_in(record)
    if form.chat is not None:
        turns = with_system(_turns(record, form.chat), data.system_prompt)
        return ExampleRow(index=index, chosen=_whole(turns, form.chat, tools))
    if form.text is not None:
        return ExampleRow(index=index, chosen=Chat(turns=[], text=_text(record, form.text)))
    if form.sides:
        return _pair(record, index, form, data=data, tools=tools)
    assert form.prompt is not None and form.response is not None, form
    prompt = with_system(_prompt(record, form), data.system_prompt)
    chat = _answered(prompt, record, form.response, tools)
    if form.judged is None:
        return ExampleRow(index=index, chosen=chat)
    judged = record.get(form.judged)
    if not isinstance(judged, bool) and judged not in (0, 1):
        raise ValueError(f"`{form.judged}` must be true or false, and is {judged!r}")
    return ExampleRow(
        index=index, chosen=chat if judged else None, rejected=None if judged else chat
    )


def _pair(
    record: Mapping[str, Any], index: int, form: ExampleColumns, *, data: Data, tools: Tools
) -> ExampleRow:
    sides = []
    for side in (CHOSEN, REJECTED):
        if form.prompt is not None:
            prompt = with_system(_prompt(record, form), data.system_prompt)
            sides.append(_answered(prompt, record, side, tools))
        else:
            turns = with_system(_turns(record, side), data.system_prompt)
            sides.append(_whole(turns, side, tools))
    chosen, rejected = sides
    if form.prompt is None:
        first = _end_of_prompt(chosen.turns, rejected.turns)
        chosen, rejected = (Chat(turns=side.turns, first=first, tools=tools) for side in sides)
    margin = record.get(MARGIN_COLUMN)
    if margin is None:
        margin = 0.0
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not is_number or not math.isfinite(margin):
        raise ValueError(f"`{MARGIN_COLUMN}` must be a number, and is {margin!r}")
    return ExampleRow(index=index, chosen=chosen, rejected=rejected, margin=float(margin))


def _end_of_prompt(chosen: Turns, rejected: Turns) -> int:
    """Return the number of turns that both sides begin with. The assistant answers there, in two
    ways."""
    count = 0
    for one, other in zip(chosen[:-1], rejected[:-1], strict=False):
        if one != other:
            break
        count += 1
    same = any(turn["role"] == "user" for turn in chosen[:count])
    if not same or {chosen[count]["role"], rejected[count]["role"]} != {"assistant"}:
        raise ValueError(f"`{CHOSEN}` and `{REJECTED}` do not begin with the same prompt")
    return count


def _answered(prompt: Turns, record: Mapping[str, Any], key: str, tools: Tools) -> Chat:
    """Return a prompt with the response in column `key`: a text, or turns that may repeat the
    prompt."""
    value = present(record, key)
    if isinstance(value, list):
        turns = turns_in(value, key)
        asked = prompt[prompt[0]["role"] == "system" :]
        for repeated in (prompt, asked):  # the system prompt may be the recipe's
            turns = turns[len(repeated) :] if turns[: len(repeated)] == repeated else turns
        if turns and turns[0]["role"] in ("system", "user"):
            raise ValueError(f"`{key}` begins with another prompt than that of the row")
        return _whole([*prompt, *turns], key, tools, first=len(prompt))
    answer = {"role": "assistant", "content": _text(record, key)}
    return Chat(turns=[*prompt, answer], first=len(prompt), tools=tools)


def _whole(turns: Turns, key: str, tools: Tools, *, first: int = 0) -> Chat:
    if not turns:
        raise ValueError(f"`{key}` is an empty list")
    last = turns[-1]
    if last["role"] != "assistant":
        raise ValueError(f"the last turn of `{key}` is the {last['role']}'s, not the assistant's")
    if not (last.get("content") or last.get("tool_calls")):
        raise ValueError(f"the last turn of `{key}` is empty")
    return Chat(turns=turns, first=first, tools=tools)


def _prompt(record: Mapping[str, Any], form: ExampleColumns) -> Turns:
    key = form.prompt
    assert key is not None, form
    value = present(record, key)
    if not isinstance(value, list):
        text = _text(record, key)
        if form.context is not None and record.get(form.context) not in (None, ""):
            text = f"{text}\n\n{_text(record, form.context)}"
        return [{"role": "user", "content": text}]
    turns = _turns(record, key)
    if turns[-1]["role"] == "assistant":
        raise ValueError(f"`{key}` ends with the assistant's turn, which is the response's place")
    return turns


def _turns(record: Mapping[str, Any], key: str) -> Turns:
    value = present(record, key)
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError(f"`{key}` must be a list of messages, not a text") from None
    if not isinstance(value, list):
        raise ValueError(f"`{key}` must be a list of messages, not {type(value).__name__}")
    return turns_in(value, key)


def _text(record: Mapping[str, Any], key: str) -> str:
    value = present(record, key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"`{key}` must be text, not {type(value).__name__}")
    text = str(value)
    if not text.strip():
        raise ValueError(f"`{key}` is empty")
    require_text(text, f"`{key}`")
    return text
