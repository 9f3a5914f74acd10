"""Parses messages, tools and texts of a row, in the forms that other programs write, into turns for
chat templates. It knows no column and no file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from milescli.core.files import parse_json
from milescli.data.columnar import OPEN_OBJECT, without_nulls
from milescli.data.images import COLUMNS, MARK, PARTS, Source, source_in, sources_in
from milescli.data.tables import kind_of

Turns = list[dict[str, Any]]
"""`role` and `content`, both text, and further keys that a template takes: `tool_calls`, `name`,
..."""
Tools = list[dict[str, Any]]
"""JSON schemas of the tools that the model may call."""
Images = list[Source | None] | None
"""List that receives the images of messages, whose marks stay in the text; see `images.with_marks`.
None: only text is read, and an image is an error."""

ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "model", "ai", "chatgpt"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
    "system": "system",
    "developer": "developer",
}
"""Roles in other programs -> roles of chat templates. call: the assistant's call of a tool, as JSON
in its content."""
MEDIA = frozenset(
    f"{name}{end}"
    for name in ("image", "video", "audio", "input_image", "input_audio")
    for end in ("", "s", "_url", "_urls", "_path", "_paths")
) | frozenset(("pixel_values", "jpg", "png", "webp", "mp4", "wav", "mp3", "flac"))
"""Names of columns, parts and fields with content other than text."""
_MEDIA_FIELDS = {"bytes", "path", "array", "sampling_rate"}
"""Fields of an image, sound or video as `datasets` writes it."""
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_DIALOGUE = re.compile(r"\n\n(Human|Assistant):")
"""The marker of each turn in a dialogue that is written as one text (HH)."""


def value_at(record: Mapping[str, Any], key: str) -> Any:
    """Return the value of column `key`, or of a field within: `reward_model.ground_truth`. An
    object may be written as JSON. None if it is absent."""
    if key in record or "." not in key:
        return record.get(key)
    value: Any = record
    for name in key.split("."):
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = parsed(value)
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def present(record: Mapping[str, Any], key: str) -> Any:
    """Return the value of column `key`. Raises ValueError if the row has none."""
    value = value_at(record, key)
    if value is None:
        is_absent = key not in record and ("." not in key or key.partition(".")[0] not in record)
        raise ValueError(f"`{key}` is missing" if is_absent else f"`{key}` is null")
    return value


def as_chat(value: Any, key: str, images: Images = None) -> Turns | None:
    """Return the turns of a value that is a list of messages, one message, JSON of these, or a
    dialogue in one text; None if it is anything else. Raises ValueError with the reason."""
    if isinstance(value, str):
        if is_dialogue(value):
            return _dialogue(value)
        found = parsed(value) if value.lstrip()[:1] == "[" else None
        return turns_in(found, key, images) if is_chat(found) else None
    if isinstance(value, dict) and is_chat([value]):
        return turns_in([value], key, images)
    return turns_in(value, key, images) if isinstance(value, list) else None


def is_dialogue(text: str) -> bool:
    """Return True if a text is a dialogue with the markers of HH."""
    return text.lstrip().startswith("Human:") and "\n\nAssistant:" in text


def is_chat(value: object) -> bool:
    """Return True if a value is a list of messages, in any form."""
    if not isinstance(value, list) or not value:
        return False
    first = parsed(value[0]) if isinstance(value[0], str) else value[0]
    return isinstance(first, dict) and (
        "role" in first or {"from", "value"} <= set(first) or _is_exchange(first)
    )


def turns_in(value: list[Any], key: str, images: Images = None) -> Turns:
    """Parse the list of messages in column `key`. Raises ValueError with the reason."""
    if not value:
        raise ValueError(f"`{key}` is an empty list")
    turns: Turns = []
    for place, item in enumerate(value):
        if _is_simple(item):
            turns.append(item)
            continue
        for turn in _turns_of(item, f"`{key}[{place}]`", images):
            last = turns[-1] if turns else None
            if turn.pop("joins", False) and last and last.get("tool_calls"):
                last["tool_calls"] = [*last["tool_calls"], *turn["tool_calls"]]
            else:
                turns.append(turn)
    return turns


def _is_simple(item: Any) -> bool:
    """Return True if a message has the standard form: a quick test, as most of millions of messages
    have it."""
    if type(item) is not dict or len(item) != 2:
        return False
    role, content = item.get("role"), item.get("content")
    return (
        type(role) is str
        and ROLES.get(role) == role
        and type(content) is str
        and content.isascii()
        and not content.isspace()
        and content != ""
    )


def _turns_of(value: Any, where: str, images: Images) -> Turns:
    """Return the turns of one message: usually one; several if it contains results of tools, or is
    a question with its answer."""
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        value = parsed(value)
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a message with `role` and `content`")
    if _is_exchange(value):
        question, answered = value.get("human", value.get("user")), value["assistant"]
        pair = (("user", question), ("assistant", answered))
        return [_turn({"role": role, "content": text}, where, images) for role, text in pair]
    value = {key: item for key, item in value.items() if item is not None}
    if "from" in value and "value" in value:
        role = str(value.pop("from"))
        if role not in ROLES:
            known = ", ".join(ROLES)
            raise ValueError(f"{where} is from `{role}`, which is not one of {known}")
        value = {"role": role, "content": value.pop("value"), **value}
    role = value.get("role")
    if not isinstance(role, str) or not role.strip():
        raise ValueError(f"{where} has no `role`")
    value["role"] = ROLES.get(role, role)
    if "parts" in value and "content" not in value:  # Gemini's name for it
        value["content"] = value.pop("parts")
    if value["role"] == "call":
        calls = _calls(value.pop("content", None), f"{where}.content")
        return [{**value, "role": "assistant", "content": "", "tool_calls": calls, "joins": True}]
    if "function_call" in value:
        value["tool_calls"] = _calls(value.pop("function_call"), f"{where}.function_call")
    blocks = value.get("content")
    if isinstance(blocks, list) and any(_is_block(block) for block in blocks):
        return _turns_of_blocks(value, blocks, where, images)
    return [_turn(value, where, images)]


def _turn(turn: dict[str, Any], where: str, images: Images = None) -> dict[str, Any]:
    """Return a message with text as its content."""
    column_images = [turn.pop(key) for key in COLUMNS if key in turn] if images is not None else []
    if media := next((key for key in turn if key in MEDIA and turn[key] not in ([], "")), None):
        raise ValueError(f"{where} has `{media}`, but only text is supported")
    content = turn["content"] = _content(turn.get("content", ""), where, images)
    if images is not None and (
        sources := [each for value in column_images for each in sources_in(value)]
    ):
        images += sources
        if MARK not in content:
            content = turn["content"] = MARK * len(sources) + content
    if not content.strip() and not turn.get("tool_calls"):
        raise ValueError(f"{where}.content is empty")
    return turn


def _content(content: object, where: str, images: Images) -> str:
    """Return the text of a message: a text, or a list of parts that are text or images."""
    if isinstance(content, list):
        content = "".join(_text_of_part(part, where, images) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{where}.content must be text, not {type(content).__name__}")
    require_text(content, f"{where}.content")
    return content


def _text_of_part(part: Any, where: str, images: Images) -> str:
    part = part if isinstance(part, dict) else {}
    kind, text = part.get("type"), part.get("text")
    is_image = kind in PARTS or (kind is None and any(part.get(name) for name in PARTS))
    if images is not None and is_image:
        images.append(source_in(part))
        return MARK
    if kind not in _TEXT_PARTS:
        raise ValueError(f"{where}.content has a part of type `{kind}`, but only text is supported")
    if not isinstance(text, str):
        raise ValueError(f"{where}.content has a part that is not text")
    if media := next((key for key in part if part[key] and key in MEDIA), None):
        raise ValueError(f"{where}.content has a part with `{media}`, but only text is supported")
    return text


def _is_exchange(value: Mapping[str, object]) -> bool:
    """Return True if a message is a question with its answer, as in ms-swift."""
    return "assistant" in value and ("human" in value or "user" in value)


def _is_block(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in ("tool_use", "tool_result", "thinking")


def _turns_of_blocks(turn: dict[str, Any], blocks: list[Any], where: str, images: Images) -> Turns:
    """Return the turns of a message in Anthropic's blocks: calls of the assistant become its
    `tool_calls`, each result a turn of the tool before the user's text."""
    results: Turns = []
    calls, texts, thoughts = list(turn.get("tool_calls") or []), [], []
    for block in blocks:
        if not _is_block(block):
            texts.append(block)
        elif block["type"] == "tool_use":
            calls += _calls({**block, "arguments": block.get("input", {})}, where)
        elif block["type"] == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        else:
            content = block.get("content", "")
            result = {"role": "tool", "content": content, "tool_call_id": block.get("tool_use_id")}
            known = {k: v for k, v in result.items() if v is not None}
            results.append(_turn(known, where, images))
    rest = {**turn, "content": texts}
    if thoughts:
        rest["reasoning_content"] = "\n".join(thoughts)
    if calls:
        rest["tool_calls"] = calls
    return [*results, _turn(rest, where, images)] if texts or calls or not results else results


def calls_in(value: Any, key: str) -> Turns:
    """Return the assistant's turn that makes the tool calls of column `key`: a list of calls, or
    its JSON. Raises ValueError with the reason."""
    return [{"role": "assistant", "content": "", "tool_calls": _calls(value, f"`{key}`")}]


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    value = parsed(value) if isinstance(value, str) else value
    calls = []
    for call in value if isinstance(value, list) else [value]:
        inner = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise ValueError(f"{where} is not a tool call: JSON with `name` and `arguments`")
        given = inner.get("arguments", inner.get("parameters", {}))
        found = parsed(given) if isinstance(given, str) else given
        function = {"name": inner["name"], "arguments": given if found is None else found}
        number = call.get("id")
        calls.append(
            {**({"id": number} if number else {}), "type": "function", "function": function}
        )
    if not calls:
        raise ValueError(f"{where} is an empty list")
    return calls


def _dialogue(text: str) -> Turns:
    """Return the turns of a dialogue in one text, without empty ones at its end."""
    _, *parts = _DIALOGUE.split(f"\n\n{text.lstrip()}")
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = [
        {"role": roles[role], "content": content.strip()}
        for role, content in zip(parts[::2], parts[1::2], strict=True)
    ]
    if len(turns) > 1 and not turns[-1]["content"]:
        turns.pop()
    if empty := next((number for number, turn in enumerate(turns) if not turn["content"]), None):
        raise ValueError(f"turn {empty + 1} of the dialogue is empty")
    for turn in turns:
        require_text(turn["content"], "the dialogue")
    return turns


def tools_in(record: Mapping[str, Any], key: str) -> Tools:
    """Parse the tools in column `key`, a list or its JSON, to OpenAI's form; empty without any.
    Raises ValueError with the reason."""
    value = value_at(record, key)
    if isinstance(value, str):
        if not value.strip():
            return []
        try:
            value = parse_json(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"`{key}` is not JSON: {error.msg}") from None
    if value is None:
        return []
    if isinstance(value, list):
        value = [parsed(tool) if isinstance(tool, str) else tool for tool in value]
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError(f"`{key}` must be a list of tools")
    return [_tool(without_nulls(tool) if _was_columnar(tool) else tool) for tool in value]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in OpenAI's form."""
    if "function" in tool or not isinstance(tool.get("name"), str):
        return tool
    function = {key: item for key, item in tool.items() if key not in ("type", "input_schema")}
    schema = tool.get("parameters", tool.get("input_schema"))
    if isinstance(schema, dict):
        function["parameters"] = _schema(schema)
    return {"type": "function", "function": function}


_JSON_TYPES = {
    **dict.fromkeys(("str", "string"), "string"),
    **dict.fromkeys(("int", "integer"), "integer"),
    **dict.fromkeys(("float", "number"), "number"),
    **dict.fromkeys(("bool", "boolean"), "boolean"),
    **dict.fromkeys(("list", "tuple", "set", "array"), "array"),
    **dict.fromkeys(("dict", "object"), "object"),
}


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments, which xlam writes as one entry for each:
    `{"city": {"type": "str, optional", "default": "Rome"}}`."""
    names = {name: entry for name, entry in schema.items() if isinstance(entry, dict)}
    if OPEN_OBJECT in schema or len(names) < len(schema) or not names:
        return schema
    properties, required = {}, []
    for name, entry in names.items():
        written = str(entry.get("type", ""))
        word = re.split(r"[\[,( ]", written.strip().lower(), maxsplit=1)[0]
        properties[name] = {**entry, "type": _JSON_TYPES[word]} if word in _JSON_TYPES else entry
        if "optional" not in written and entry.get("default") in (None, ""):
            required.append(name)
    return {"type": "object", OPEN_OBJECT: properties, "required": required}


_NEVER_NULL = frozenset(
    f"type description {OPEN_OBJECT} required items enum name parameters function format title "
    "anyOf minimum maximum additionalProperties".split()
)
"""Words that no tool and no JSON schema sets to null."""


def _was_columnar(value: Any, name: str = "") -> bool:
    """Return True if a tool, in JSON that was written from a columnar type, has a null that only
    such a type leaves: for an argument, or for a word that is never null."""
    if isinstance(value, dict):
        return any(
            name == OPEN_OBJECT or key in _NEVER_NULL if item is None else _was_columnar(item, key)
            for key, item in value.items()
        )
    return isinstance(value, list) and any(_was_columnar(item) for item in value)


def without_foreign_arguments(turns: Turns, tools: Tools) -> Turns:
    """Return the turns without those null arguments of calls that the tool does not have: a
    columnar type leaves them. Other nulls stay."""
    own = {
        tool["function"].get("name"): tool["function"].get("parameters", {}).get(OPEN_OBJECT, {})
        for tool in tools
        if isinstance(tool.get("function"), dict)
        and isinstance(tool["function"].get("parameters", {}), dict)
    }
    for turn in turns:
        for call in turn.get("tool_calls") or ():
            function = call.get("function", call) if isinstance(call, dict) else {}
            given = function.get("arguments")
            if isinstance(given, dict) and None in given.values() and function.get("name") in own:
                names = own[function["name"]]
                arguments = {k: v for k, v in given.items() if v is not None or k in names}
                function["arguments"] = arguments
    return turns


def history_in(value: Any, key: str) -> Turns:
    """Return the turns before a prompt, from a list of (question, answer), a list of messages, or
    its JSON. Raises ValueError with the reason."""
    value = parsed(value) if isinstance(value, str) else value
    if is_chat(value):
        return turns_in(value, key)
    turns: Turns = []
    for exchange in value if isinstance(value, list) else [value]:
        if not isinstance(exchange, Sequence) or isinstance(exchange, str) or len(exchange) != 2:
            raise ValueError(f"`{key}` must be a list of questions with their answers")
        for role, text in zip(("user", "assistant"), exchange, strict=True):
            turns.append(_turn({"role": role, "content": text}, f"`{key}`"))
    return turns


def with_system(turns: Turns, system_prompt: str | None) -> Turns:
    """Return the turns with the recipe's system prompt before them, unless they have one of their
    own."""
    if system_prompt is None or (turns and turns[0]["role"] == "system"):
        return turns
    return [{"role": "system", "content": system_prompt}, *turns]


def require_text(text: str, where: str) -> None:
    """Raise ValueError for a text that cannot be written as UTF-8."""
    if not text.isascii() and any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        raise ValueError(f"{where} contains half of a surrogate pair, which is not valid text")


def is_media(value: Any) -> bool:
    """Return True if a value is an image, a sound or a video, or a list of them, as `datasets`
    writes them."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, dict) and bool(first) and first.keys() <= _MEDIA_FIELDS


def parsed(text: Any) -> Any:
    """Return the value of a JSON text; None if `text` is not JSON."""
    try:
        return parse_json(text)
    except ValueError:
        return None


def kind_in(value: object) -> str:
    """Return the name of a value's kind, for an error."""
    return "an image, a sound or a video" if is_media(value) else kind_of(value)


def with_system_message(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with developer messages as system messages; those that begin a chat are
    one message, as templates take a system message in the first place alone."""
    converted: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("role") == "developer":
            message = {**message, "role": "system"}
        before = converted[0] if len(converted) == 1 else {}
        texts = (before.get("content"), message.get("content"))
        if before.get("role") == message.get("role") == "system" and all(
            isinstance(text, str) for text in texts
        ):
            converted = [{**before, "content": "\n\n".join(map(str, texts))}]
        else:
            converted.append(message)
    return converted
