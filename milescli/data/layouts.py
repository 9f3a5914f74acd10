"""Finds the layout of a row, the columns that a run reads in it, and those that look like part of
the prompt but are not read. `rows` and `example_rows` parse the content of the columns."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milescli.core.errors import DataError, nearest
from milescli.data.choices import is_options
from milescli.data.images import COLUMNS as IMAGE_COLUMNS
from milescli.data.layout_table import BY_NAME, LAYOUTS, Layout, Use
from milescli.data.messages import (
    MEDIA,
    Turns,
    as_chat,
    is_chat,
    is_dialogue,
    is_media,
    kind_in,
    parsed,
    value_at,
)

PROMPT_COLUMNS = (
    *("prompt", "messages", "question", "problem", "query", "instruction", "input"),
    *("conversations", "conversation", "context_messages", "contents"),
)
LABEL_COLUMNS = (
    *("label", "answer", "solution", "target", "ground_truth", "expected_answer", "final_answer"),
)
SYSTEM_COLUMNS = (
    *("system", "system_prompt", "system_message", "systemInstruction", "system_instruction"),
)
TOOLS_COLUMNS = ("tools", "functions")
HISTORY_COLUMN, CONTEXT_COLUMN, INSTRUCTION_COLUMN = "history", "input", "instruction"
_LIKE_PROMPT = frozenset(
    (
        *PROMPT_COLUMNS, *SYSTEM_COLUMNS, *TOOLS_COLUMNS, HISTORY_COLUMN,
        "chat_history", "context", "contexts", "instructions", "choices", "options", "document",
        "documents", "passage", "passages", "article", "background", "few_shot", "fewshot",
        "starter_code", "chat_template_kwargs", "objects", "dialog", "dialogue",
    )
)  # fmt: skip
"""Names of columns that look like part of the prompt, besides those of MEDIA."""
_RIVALS = frozenset(PROMPT_COLUMNS) - {INSTRUCTION_COLUMN, CONTEXT_COLUMN}
"""Columns that each are a whole prompt, so that one of them excludes the others."""
_KNOWN_ROWS = 1000
"""Different sets of columns that are remembered."""


def _fits(value: Any, shape: str) -> bool:
    """Return True if a value has the shape that a layout requires."""
    if value is None:
        return False
    match shape:
        case "text":
            return isinstance(value, str)
        case "dialogue":
            return isinstance(value, str) and is_dialogue(value)
        case "bool":
            return isinstance(value, bool)
        case "list":
            return isinstance(value, list)
        case "turn":
            return isinstance(value, dict) and is_chat([value])
        case "options":
            return is_options(value)
        case "":
            return True
    chat = list(_messages(value))
    match shape:
        case "turns":
            return bool(chat) and "from" in chat[0]
        case "exchanges":
            return bool(chat) and "assistant" in chat[0]
        case "blocks":
            kinds = ("tool_use", "tool_result", "thinking")
            blocks = [block for each in chat for block in _blocks(each)]
            return any(block.get("type") in kinds for block in blocks)
        case _:
            assert shape == "chat", shape
            return bool(chat)


def _messages(value: Any) -> Sequence[dict[str, Any]]:
    """Return the messages of a value; empty if it is no chat."""
    found = parsed(value) if isinstance(value, str) else value
    if not is_chat(found):
        return []
    each = (parsed(item) if isinstance(item, str) else item for item in found)
    return [item for item in each if isinstance(item, dict)]


def _blocks(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    content = message.get("content")
    yield from (
        (part for part in content if isinstance(part, dict)) if isinstance(content, list) else ()
    )


def find_layout(record: Mapping[str, Any]) -> Layout:
    """Return the layout of a row; BY_NAME if no layout of the table fits."""
    for layout in LAYOUTS:
        if all(_fits(value_at(record, column), shape) for column, shape in layout.has.items()):
            return layout
    return BY_NAME


def use_of(record: Mapping[str, Any]) -> Use:
    """Return the use of a file, judged by its first row, if the recipe does not state it."""
    layout = find_layout(record)
    chat = layout.reads.get("chat")
    if layout.use == "prompts" and chat != layout.reads.get("prompt"):
        return "prompts"
    if layout.use == "pairs" or chat is None:
        return layout.use
    try:
        turns = as_chat(value_at(record, chat), chat, [])
    except ValueError:  # a run says by line what is wrong
        return "chats"
    return "chats" if turns and turns[-1]["role"] == "assistant" else "prompts"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraColumns:
    """Names the further columns of a prompt, for rows with the same columns."""

    system: str | None = None
    context: str | None = None
    history: str | None = None
    tools: str | None = None
    images: str | None = None
    unread: tuple[str, ...] = ()
    """Columns that look like part of the prompt and are not read."""


NO_EXTRA_COLUMNS = ExtraColumns()


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Names the columns of a file that are read, each None if there is none."""

    path: Path
    layout: Layout = BY_NAME
    prompt: str | None = None
    label: str | None = None
    needs_label: bool = False
    """True if a row without a label is bad."""
    demonstration: str | None = None
    """The worked response to a prompt."""
    chat: str | None = None
    text: str | None = None
    response: str | None = None
    calls: str | None = None
    judged: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    choices: tuple[str, ...] = ()
    """Columns with the options of a question, whose label becomes a letter."""
    ignored: frozenset[str] = frozenset()
    """Columns of `data.ignore_columns`."""
    is_prompt_given: bool = False
    """True if a key names the prompt, so that other candidate columns are ignored."""
    sees_images: bool = False
    """True if the model accepts images; otherwise a column of images would be ignored."""
    known: dict[tuple[str, ...], ExtraColumns] = field(default_factory=dict)
    """Columns of a row -> its further columns of the prompt."""

    @property
    def main(self) -> tuple[str | None, ...]:
        """Return the columns with the main parts of each row."""
        learned = (self.chat, self.text, self.response, self.calls, self.chosen, self.rejected)
        return (self.prompt, self.label, self.demonstration, self.judged, *learned)

    def extra_columns(self, record: Mapping[str, Any]) -> ExtraColumns:
        """Return the further columns of the prompt in a row."""
        names = tuple(record)
        found = self.known.get(names)
        if found is None:
            if len(self.known) > _KNOWN_ROWS:  # whose names are as many as its rows
                self.known.clear()
            found = self.known[names] = self._look(record)
        return found

    def _look(self, record: Mapping[str, Any]) -> ExtraColumns:
        names = {name for name in record if name not in self.ignored}
        own = {each for each in self.main if each is not None}
        free, stated = names - own, self.layout.reads
        system = _first((stated.get("system"), *SYSTEM_COLUMNS), free)
        tools = _first((*TOOLS_COLUMNS,), free)
        if tools is None and (within := stated.get("tools")) and value_at(record, within):
            tools = within
        context = _first((stated.get("context"),), free)
        if self.prompt == INSTRUCTION_COLUMN and context is None:
            context = _first((CONTEXT_COLUMN,), free)
        history = _first((HISTORY_COLUMN,), free) if self.prompt is not None else None
        images = _first(IMAGE_COLUMNS if self.sees_images else (), free)
        read = {system, tools, context, history, images}
        read |= {each.partition(".")[0] for each in own} - {self._parent_column} | {*self.choices}
        if self.is_prompt_given:
            read |= _RIVALS
        left = free - read - self.layout.aside
        # what is empty in this row may be an image in the next
        unread = tuple(
            name
            for name in record
            if name in left
            and (
                name == self._parent_column
                or _is_like_prompt(name, value := record[name])
                or not value
            )
        )
        found = ExtraColumns(
            system=system,
            context=context,
            history=history,
            tools=tools,
            images=images,
            unread=unread,
        )
        return NO_EXTRA_COLUMNS if found == NO_EXTRA_COLUMNS else found

    @property
    def _parent_column(self) -> str | None:
        """Return the column whose object has the prompt as a field; None if the prompt is itself a
        column."""
        return self.prompt.partition(".")[0] if self.prompt and "." in self.prompt else None

    def _unread_in(
        self, record: Mapping[str, Any], unread: Sequence[str]
    ) -> Iterator[tuple[str, Any]]:
        """Yield each column of `unread` that is not empty, with its value; for the object around
        the prompt, its other fields."""
        read = {self.prompt, self.label, self.layout.reads.get("tools"), *self.ignored}
        for name in unread:
            value = record.get(name)
            inner = value if name == self._parent_column and isinstance(value, dict) else {}
            fields = {f"{name}.{each}": inner[each] for each in inner}
            for place, found in (fields or {name: value}).items():
                last = place.rpartition(".")[2] if fields else place
                is_gap = isinstance(found, str) and not found.strip()
                if found and not is_gap and place not in read and _is_like_prompt(last, found):
                    yield place, found

    def require_all_read(
        self, record: Mapping[str, Any], unread: Sequence[str], turns: Turns
    ) -> None:
        """Raise DataError if the row has a value in a column that looks like part of the prompt but
        is not read. A text that also occurs in `turns`, which are read, is not missing."""
        for name, value in self._unread_in(record, unread):
            if is_media(value):
                why = f"it holds {kind_in(value)}, and only text is read"
            elif name.rpartition(".")[2].lower() in MEDIA:
                why = f"it holds `{name}`, and only text is read"
            elif _occurs_in(value, turns):
                continue
            else:
                why = f"it looks like part of the prompt, and a row has {kind_in(value)} there"
            ignored = [*sorted(self.ignored), name]
            given = name if len(ignored) == 1 else f"[{', '.join(ignored)}]"
            fixes = [f"{data_option('ignore_columns', given)}   # train without it"]
            if name in PROMPT_COLUMNS and self.prompt is not None:
                fixes.append(data_option("prompt_key", name))
            raise DataError(
                f"the column `{name}` of {self.path} would be ignored", why=why, fix=fixes
            )

    def described(self, record: Mapping[str, Any]) -> dict[str, str]:
        """Return column -> role, for each column that is read."""
        extra = self.extra_columns(record)
        roles = {
            "prompt": self.prompt, "context": extra.context, "history": extra.history,
            "system turn": extra.system, "tools": extra.tools, "chat": self.chat,
            "text": self.text, "response": self.response, "calls of tools": self.calls,
            "worked response": self.demonstration, "chosen": self.chosen,
            "rejected": self.rejected, "label": self.label, "good or bad": self.judged,
            "images": extra.images,
        }  # fmt: skip
        found = {column: role for role, column in roles.items() if column is not None}
        return {**dict.fromkeys(self.choices, "option"), **found}


def data_option(key: str, value: str) -> str:
    """Return the option that sets `data.<key>`, ready to paste."""
    return f"--set {shlex.quote(f'data.{key}={value}')}"


def _is_like_prompt(name: str, value: Any) -> bool:
    return name.lower() in _LIKE_PROMPT or name.lower() in MEDIA or is_media(value)


def _first(names: Sequence[str | None], there: set[str]) -> str | None:
    return next((name for name in names if name in there), None)


def _occurs_in(value: Any, turns: Turns) -> bool:
    """Return True if a column's value is also read elsewhere: a text within a turn, or a chat whose
    turns, except for the assistant's, are all in `turns`."""
    try:
        chat = as_chat(value, "", [])
    except ValueError:
        return False
    if chat is None:
        texts = [value.strip()] if isinstance(value, str) else [None]
    else:
        texts = [turn["content"].strip() for turn in chat if turn["role"] != "assistant"]
    return all(
        text is not None and any(text in turn["content"] for turn in turns) for text in texts
    )


def fields_of(record: Mapping[str, Any]) -> list[str]:
    """Return the names of the columns of a row, and of the fields of objects:
    `extra_info.answer`."""
    names = []
    for name, value in record.items():
        is_open = isinstance(value, dict) and not is_media(value)
        names += [f"{name}.{inner}" for inner in value] if is_open and value else [name]
    return names


def require_column(wanted: str, record: Mapping[str, Any], path: Path, *, key: str) -> str:
    """Return the column `wanted`, which `data.<key>` names: a column of the row, or a field of an
    object in it. Raises DataError if it is absent."""
    if wanted in record or value_at(record, wanted) is not None:
        return wanted
    names = fields_of(record)
    raise DataError(
        f"{path} has no column `{wanted}`",
        why=f"its columns are {', '.join(names)}",
        fix=data_option(key, nearest(wanted, names) or names[0]),
    )


def find_column(
    record: Mapping[str, Any],
    path: Path,
    *,
    key: str,
    wanted: str | None,
    stated: str | None,
    known: Sequence[str],
    ignored: frozenset[str] = frozenset(),
) -> str | None:
    """Return the column that `data.<key>` names (`wanted`), else that of the layout (`stated`),
    else the one of the `known` names that exists; None if there is none. Raises DataError if
    several exist."""
    if wanted is not None:
        return require_column(wanted, record, path, key=key)
    if stated is not None:
        return stated
    likely = [name for name in known if name in record and name not in ignored]
    if len(likely) > 1:
        raise DataError(
            f"which column of {path} is the {key.removesuffix('_key')}?",
            why=f"{' and '.join(likely)} are {'both' if len(likely) == 2 else 'all'} present; "
            f"its columns are {', '.join(record)}",
            fix=[data_option(key, name) for name in likely],
        )
    return likely[0] if likely else None


def require_text_label(label: str, record: Mapping[str, Any], path: Path) -> None:
    """Raise DataError if the label of the first row is an object: one of its fields must be
    chosen."""
    value = value_at(record, label)
    if isinstance(value, dict) and value:
        plain = [name for name in value if not isinstance(value[name], dict | list)]
        raise DataError(
            f"the label column `{label}` of {path} contains objects",
            why=f"a label must be text or a number; the fields are {', '.join(value)}",
            fix=[data_option("label_key", f"{label}.{name}") for name in plain or value],
        )


def no_column(
    record: Mapping[str, Any],
    path: Path,
    *,
    key: str,
    known: Sequence[str],
    taken: Sequence[str | None] = (),
) -> DataError:
    """Return the error that no column qualifies as `data.<key>`. `taken`: columns with other
    roles."""
    role, names = key.removesuffix("_key"), fields_of(record)
    free = [name for name in names if name not in taken and _is_plain(record, name, role)]
    guess = next((found for name in known if (found := nearest(name, free))), None)
    likely = [guess] if guess else free[:1] if role == "prompt" else free[:MAX_GUESSES]
    return DataError(
        f"{path} has no {role} column",
        why=f"it has none of the columns {', '.join(known)}; its columns are {', '.join(names)}",
        fix=[data_option(key, name) for name in likely]
        or _OTHERWISE[role].format(path=shlex.quote(str(path))),
    )


MAX_GUESSES = 4
"""Columns that an error suggests if no name is close to a known one."""


def _is_plain(record: Mapping[str, Any], name: str, role: str) -> bool:
    """Return True if a column may be the missing one: its value is a text, a number or, for a
    prompt, a chat."""
    value = value_at(record, name)
    if role == "prompt" and is_chat(value):
        return True
    is_other = role == "label" and name.partition(".")[0] in _LIKE_PROMPT | MEDIA
    return isinstance(value, str | int | float) and not isinstance(value, bool) and not is_other


_OTHERWISE = {
    "label": "--set rollout.reward=length   # or another without labels; hints name no {{label}}",
    "prompt": "head -c 500 {path}   # which column holds a text or a chat?",
    "response": "head -c 500 {path}   # which column holds the response?",
}
"""What to do if no column qualifies."""
