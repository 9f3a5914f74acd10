"""Parses the turns of a chat and its tools from a row of a data file, in OpenAI's form or in
ShareGPT's. `rows` and `example_rows` call it; it needs no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Turns = list[dict[str, Any]]
"""`role` and `content`, both text, and what else a template takes: `tool_calls`, `name`, ..."""
Tools = list[dict[str, Any]]
"""What may be called, as JSON schemas."""
TOOLS_COLUMN = "tools"
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "observation": "tool"}
"""Role names of ShareGPT's form (`from` and `value`) -> the template's."""


def turns_in(value: list[object], key: str) -> Turns:
    """Parse the list in column `key`. Raises ValueError with the reason."""
    if not value:
        raise ValueError(f"`{key}` is an empty list")
    return [turn_of(item, f"`{key}[{place}]`") for place, item in enumerate(value)]


def turn_of(value: object, where: str) -> dict[str, Any]:
    """One message, with text as its content. Raises ValueError with the reason."""
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
    """A text, or OpenAI's list of parts that are text."""
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
    """Of a row's column `tools`, a list or its JSON; empty without one. Raises ValueError with the
    reason."""
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
    """The same after the recipe's system prompt, where the row has none of its own."""
    if system_prompt is None or (turns and turns[0]["role"] == "system"):
        return turns
    return [{"role": "system", "content": system_prompt}, *turns]


def require_text(text: str, where: str) -> None:
    """Raises ValueError for what cannot be written as UTF-8."""
    if not text.isascii() and any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        raise ValueError(f"{where} holds half of a surrogate pair, which is not text")
