"""Parses rows to train on as text: finds the columns, and the chat, text or pair in each row.
`examples` tokenises them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from milescli.core.errors import DataError
from milescli.data.images import PromptImages, Source
from milescli.data.layouts import (
    NO_EXTRA_COLUMNS,
    Columns,
    find_column,
    find_layout,
    no_column,
)
from milescli.data.messages import (
    Images,
    Tools,
    Turns,
    as_chat,
    calls_in,
    is_dialogue,
    present,
    require_text,
    value_at,
    with_system,
)
from milescli.data.rows import Parsed, with_extra_columns, with_image_marks
from milescli.data.tables import kind_of
from milescli.recipe.data import Data
from milescli.recipe.data_files import names_in

Kind = Literal["chats", "pairs"]
"""What an objective trains on: supervised on chats (or texts), preference and reward_model on
pairs."""
RowField = Literal["train", "validation"]
"""The key under `data` that named the file."""

CHAT_COLUMNS = ("messages", "conversations", "conversation", "contents")
PROMPT_COLUMNS = ("prompt", "question", "instruction", "problem", "query", "input")
RESPONSE_COLUMNS = ("completion", "response", "output", "demonstration")
ANSWER_COLUMN = "answer"
"""The response, if no column has a name that only responses have."""
TEXT_COLUMN, MARGIN_COLUMN, JUDGED_COLUMN = "text", "margin", "label"
CHOSEN, REJECTED = "chosen", "rejected"
WEIGHTS = ("weight", "loss", "loss_weight", "train")
"""Fields of a message that say whether it is trained on."""


class Chat(NamedTuple):
    """Holds the text of a row to train on."""

    turns: Turns
    """Empty if the row is plain `text`."""
    first: int = 0
    """Index of the first turn that is trained on, if it is the assistant's."""
    tools: Sequence[Mapping[str, Any]] = ()
    text: str = ""
    images: tuple[Source | None, ...] = ()
    """Images in the order of their marks; None, while a row is parsed: the next one of its column.
    """


class ExampleRow(NamedTuple):
    """Holds one valid row, not yet tokenised."""

    index: int
    """Row in the file, counted from 0."""
    chosen: Chat | None
    """The chosen side of a pair; the chat itself if the row is no pair."""
    rejected: Chat | None = None
    margin: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleRowParser:
    """Parses the rows of one file for training, by the settings of a recipe."""

    row_class = ExampleRow
    field: RowField
    kind: Kind
    data: Data
    images: PromptImages | None = None
    """How the model sees images; None: it sees none."""

    def find(self, record: Mapping[str, Any], path: Path) -> Columns:
        """Find the columns by the first row, whose layout may be a known one. Raises DataError if
        they are not clear."""
        layout, data = find_layout(record), self.data
        ignored = frozenset(names_in(data.ignore_columns))
        if layout.refused and layout.use == self.kind and data.response_key is None:
            raise DataError(
                f"{path} does not contain {self.kind}",
                why=f"it has the layout of {layout.name}: {layout.refused}",
                fix=f"--set data.{self.field}=FILE.jsonl   # with one chat or pair per row",
            )

        def named(key: str, wanted: str | None, role: str, known: Sequence[str]) -> str | None:
            stated = layout.reads.get(role)
            return find_column(
                record, path, key=key, wanted=wanted, stated=stated, known=known, ignored=ignored
            )

        def found(**columns: str | None) -> Columns:
            is_given = data.prompt_key is not None
            return Columns(
                path=path,
                layout=layout,
                ignored=ignored,
                is_prompt_given=is_given,
                sees_images=self.images is not None,
                **columns,
            )

        chat = layout.reads.get("chat") or next((n for n in CHAT_COLUMNS if n in record), None)
        if self.kind == "chats" and chat and (data.prompt_key, data.response_key) == (None, None):
            return found(chat=chat)
        prompt = named("prompt_key", data.prompt_key, "prompt", PROMPT_COLUMNS)
        if self.kind == "pairs":
            return self._find_pairs(record, path, named, found, chat=chat, prompt=prompt)
        calls = layout.reads.get("calls") if data.response_key is None else None
        if calls is not None:
            return found(prompt=prompt, calls=calls)
        response = named("response_key", data.response_key, "response", RESPONSE_COLUMNS)
        if response is None and ANSWER_COLUMN in record:
            response = ANSWER_COLUMN
        if prompt and response and prompt != response:
            return found(prompt=prompt, response=response)
        if TEXT_COLUMN in record:
            return found(text=TEXT_COLUMN)
        key, known = "prompt_key", PROMPT_COLUMNS
        if prompt is not None:
            key, known = "response_key", (*RESPONSE_COLUMNS, ANSWER_COLUMN)
        nearby = no_column(record, path, key=key, known=known, taken=(prompt, response))
        raise DataError(
            f"{path} has no column to learn from",
            why="a row must contain a chat (`messages`), a prompt and a response, or a "
            f"`{TEXT_COLUMN}`; there is no {key.removesuffix('_key')} column; its "
            f"columns are {', '.join(record)}",
            fix=nearby.fixes,
        )

    def _find_pairs(
        self,
        record: Mapping[str, Any],
        path: Path,
        named: Callable[[str, str | None, str, Sequence[str]], str | None],
        found: Callable[..., Columns],
        *,
        chat: str | None,
        prompt: str | None,
    ) -> Columns:
        reads = find_layout(record).reads
        chosen = reads.get(CHOSEN) or (CHOSEN if CHOSEN in record else None)
        rejected = reads.get(REJECTED) or (REJECTED if REJECTED in record else None)
        if chosen and rejected:
            return found(prompt=prompt, chosen=chosen, rejected=rejected)
        if chat and rejected:
            return found(chat=chat, rejected=rejected)
        judged = JUDGED_COLUMN if JUDGED_COLUMN in record else None
        if judged and chat:
            return found(chat=chat, judged=judged)
        response = named("response_key", self.data.response_key, "response", RESPONSE_COLUMNS)
        if prompt and response and judged:
            return found(prompt=prompt, response=response, judged=judged)
        raise DataError(
            f"{path} does not contain pairs",
            why=f"a pair has the columns `{CHOSEN}` and `{REJECTED}` (and `prompt`, unless these "
            f"start with it); a single judged response has `{JUDGED_COLUMN}`, true or false; "
            f"the file's columns are {', '.join(record)}",
            fix=f"--set data.{self.field}=FILE.jsonl   # with these columns",
        )

    def parse(self, record: Mapping[str, Any], line: int, columns: Columns) -> Parsed:
        """Return the row on `line`. Raises ValueError with the reason if it cannot be used, and
        DataError if a column that looks like part of the prompt would be ignored."""
        given: Images = [] if self.images is not None else None
        row = _row_of(record, line - 1, columns, data=self.data, images=given)
        if self.images is not None:
            sides = {}
            for name in ("chosen", "rejected"):
                if (side := getattr(row, name)) is not None and side.turns:
                    own = list(side.images)
                    turns, images = with_image_marks(side.turns, own, record, columns, self.images)
                    sides[name] = side._replace(turns=turns, images=images)
            row = row._replace(**sides)
        return Parsed(row, hash(repr(row[1:3])), 0, False)


def _row_of(
    record: Mapping[str, Any], index: int, columns: Columns, *, data: Data, images: Images
) -> ExampleRow:
    """Parse a row. `images`: the list that receives those of its messages."""
    if columns.text is not None:
        text = _text(record, columns.text)
        columns.require_all_read(record, columns.extra_columns(record).unread, [{"content": text}])
        return ExampleRow(index=index, chosen=Chat(turns=[], text=text))
    if columns.chosen is not None or (columns.chat is not None and columns.rejected is not None):
        return _pair(record, index, columns, data=data, images=images)
    if columns.chat is not None:
        turns, tools = _with_other_columns(_turns(record, columns.chat, images), record, columns)
        chat = _complete_chat(
            with_system(turns, data.system_prompt), columns.chat, tools, images=images
        )
        if columns.judged is not None:
            chat = chat._replace(first=len(chat.turns) - 1)
    else:
        prompt, tools = _with_other_columns(_prompt(record, columns, data, images), record, columns)
        response = columns.calls or columns.response
        assert response is not None, columns
        prompt = with_system(prompt, data.system_prompt)
        chat = _with_response(prompt, record, response, columns, tools, images=images)
    if columns.judged is None:
        return ExampleRow(index=index, chosen=chat)
    judged = value_at(record, columns.judged)
    if not isinstance(judged, bool) and judged not in (0, 1):
        raise ValueError(f"`{columns.judged}` must be true or false, but is {judged!r}")
    return ExampleRow(
        index=index, chosen=chat if judged else None, rejected=None if judged else chat
    )


def _with_other_columns(
    turns: Turns, record: Mapping[str, Any], columns: Columns
) -> tuple[Turns, Tools]:
    """Return the turns extended by the row's other columns of the prompt, and the tools."""
    if (extra := columns.extra_columns(record)) is NO_EXTRA_COLUMNS:
        return turns, []
    turns, tools = with_extra_columns(turns, record, columns, extra)
    assert isinstance(turns, list), turns
    return turns, tools


def _pair(
    record: Mapping[str, Any], index: int, columns: Columns, *, data: Data, images: Images
) -> ExampleRow:
    assert columns.rejected is not None, columns
    if columns.prompt is not None:
        turns, tools = _with_other_columns(_prompt(record, columns, data, images), record, columns)
        turns = with_system(turns, data.system_prompt)
        assert columns.chosen is not None, columns
        chosen, rejected = (
            _with_response(turns, record, side, columns, tools, images=images)
            for side in (columns.chosen, columns.rejected)
        )
    elif columns.chat is not None:
        turns, tools = _with_other_columns(_turns(record, columns.chat, images), record, columns)
        turns = with_system(turns, data.system_prompt)
        last = len(turns) - 1
        chosen = _complete_chat(turns, columns.chat, tools, first=last, images=images)
        rejected = _with_response(
            turns[:last], record, columns.rejected, columns, tools, images=images
        )
    else:
        sides = []
        for side in (columns.chosen, columns.rejected):
            assert side is not None, columns
            own: Images = None if images is None else []
            turns, tools = _with_other_columns(_turns(record, side, own), record, columns)
            turns = with_system(turns, data.system_prompt)
            sides.append(_complete_chat(turns, side, tools, images=own))
        first = _end_of_prompt(sides[0].turns, sides[1].turns)
        chosen, rejected = (side._replace(first=first) for side in sides)
    return ExampleRow(index=index, chosen=chosen, rejected=rejected, margin=_margin(record))


def _margin(record: Mapping[str, Any]) -> float:
    margin = record.get(MARGIN_COLUMN)
    if margin is None:
        margin = 0.0
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if not is_number or not math.isfinite(margin):
        raise ValueError(f"`{MARGIN_COLUMN}` must be a number, but is {margin!r}")
    return float(margin)


def _end_of_prompt(chosen: Turns, rejected: Turns) -> int:
    """Return the number of turns that both sides of a pair share. After them the assistant answers
    in two ways."""
    count = 0
    for one, other in zip(chosen[:-1], rejected[:-1], strict=False):
        if one != other:
            break
        count += 1
    same = any(turn["role"] == "user" for turn in chosen[:count])
    if not same or {chosen[count]["role"], rejected[count]["role"]} != {"assistant"}:
        raise ValueError(f"`{CHOSEN}` and `{REJECTED}` start with different prompts")
    return count


def _with_response(
    prompt: Turns,
    record: Mapping[str, Any],
    key: str,
    columns: Columns,
    tools: Tools,
    *,
    images: Images,
) -> Chat:
    """Return a prompt, whose parts mention `images`, with the response in column `key`: a text,
    tool calls, or turns that may repeat the prompt."""
    value, given = present(record, key), tuple(images or ())
    own: Images = None if images is None else []
    turns = calls_in(value, key) if key == columns.calls else as_chat(value, key, own)
    if turns is not None:
        question = prompt[prompt[0]["role"] == "system" :]
        for repeated in (prompt, question):  # the system prompt may be the recipe's
            if repeated and turns[: len(repeated)] == repeated:
                turns, own = turns[len(repeated) :], (own or [])[len(given) :]
        if turns and turns[0]["role"] in ("system", "user"):
            raise ValueError(f"`{key}` starts with a different prompt than the row")
        shown = [*given, *(own or ())]
        return _complete_chat([*prompt, *turns], key, tools, first=len(prompt), images=shown)
    text = _text(record, key)
    if columns.layout.has.get(columns.prompt or "") == "dialogue":
        text = text.strip()  # as in the turns of the dialogue
    return Chat(
        turns=[*prompt, {"role": "assistant", "content": text}],
        first=len(prompt),
        tools=tools,
        images=given,
    )


def _complete_chat(
    turns: Turns, key: str, tools: Tools, *, first: int = 0, images: Images = None
) -> Chat:
    if not turns:
        raise ValueError(f"`{key}` is an empty list")
    last = turns[-1]
    if last["role"] != "assistant":
        raise ValueError(
            f"the last turn of `{key}` belongs to the {last['role']}, not to the assistant"
        )
    if not (last.get("content") or last.get("tool_calls")):
        raise ValueError(f"the last turn of `{key}` is empty")
    for place, turn in enumerate(turns[first:], start=first):
        off = next((name for name in WEIGHTS if turn.get(name, 1) not in (1, True)), None)
        if off and turn["role"] == "assistant":
            raise ValueError(
                f"turn {place + 1} of `{key}` has `{off}` {turn[off]}, but every assistant turn "
                "is learned with weight 1"
            )
    return Chat(turns=turns, first=first, tools=tools, images=tuple(images or ()))


def _prompt(record: Mapping[str, Any], columns: Columns, data: Data, images: Images) -> Turns:
    key = columns.prompt
    assert key is not None, columns
    value = present(record, key)
    # without a template a dialogue is read as the text that it is
    is_raw = data.chat_template == "none" and isinstance(value, str) and is_dialogue(value)
    turns = None if is_raw else as_chat(value, key, images)
    if turns is None:
        return [{"role": "user", "content": _text(record, key)}]
    if turns[-1]["role"] == "assistant":
        raise ValueError(f"`{key}` ends with the assistant's turn, where the response belongs")
    return turns


def _turns(record: Mapping[str, Any], key: str, images: Images) -> Turns:
    value = present(record, key)
    turns = as_chat(value, key, images)
    if turns is None:
        raise ValueError(f"`{key}` must be a list of messages, not {kind_of(value)}")
    return turns


def _text(record: Mapping[str, Any], key: str) -> str:
    value = present(record, key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"`{key}` must be text, not {kind_of(value)}")
    text = str(value)
    if not text.strip():
        raise ValueError(f"`{key}` is empty")
    require_text(text, f"`{key}`")
    return text
