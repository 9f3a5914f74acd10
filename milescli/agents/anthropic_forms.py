"""Anthropic's messages as OpenAI's, and back. Pure; `proxy` speaks HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from milescli.agents.openai_forms import (
    Answered,
    Asked,
    Json,
    require_texts,
    sampling_of,
    usage,
)
from milescli.core.files import parse_json

_ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def messages_asked(body: Mapping[str, Any]) -> Asked:
    """Parse a request of /v1/messages. Raises ValueError with what is wrong."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise ValueError("`messages` must be a non-empty list of messages")
    messages: list[Json] = []
    if system := _text(body.get("system")):
        messages.append({"role": "system", "content": system})
    for message in given:
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
            raise ValueError("a message must have content and a role, user or assistant")
        messages += _messages(message)
    most = body.get("max_tokens")
    if type(most) is not int or most < 1:
        raise ValueError("`max_tokens` must be a whole number of at least 1")
    choice = body.get("tool_choice") or {}
    wanted = choice.get("type", "auto") if isinstance(choice, dict) else choice
    if wanted not in ("auto", "none"):
        raise ValueError("`tool_choice` must be auto or none, because sampling is not constrained")
    stop = body.get("stop_sequences")
    if stop is not None and not all(isinstance(text, str) and text for text in stop):
        raise ValueError("`stop_sequences` must be texts")
    return Asked(
        messages=messages,
        tools=[_tool(tool) for tool in body.get("tools") or []] if wanted == "auto" else [],
        max_new_tokens=most,
        stop=stop or None,
        streams=bool(body.get("stream")),
        sampling=sampling_of(body),
    )


def message_response(answered: Answered, *, model: str, number: str) -> Json:
    """Return the response of /v1/messages."""
    assert answered.reply is not None, "a chat has replies"
    message, content = answered.reply.message, list[Json]()
    if thought := message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": thought, "signature": ""})
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        used = {"type": "tool_use", "id": call["id"], "name": name, "input": _loaded(arguments)}
        content.append(used)
    told = usage([answered])
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": _ENDS[answered.finish_reason],
        "stop_sequence": None,
        "usage": {
            "input_tokens": told["prompt_tokens"],
            "output_tokens": told["completion_tokens"],
        },
    }


def message_events(response: Json) -> Iterator[str]:
    """The same as server-sent events: what was sampled comes at once, when it is there."""
    yield _event("message_start", message={**response, "content": [], "stop_reason": None})
    for index, block in enumerate(response["content"]):
        begun, delta = _in_parts(block)
        yield _event("content_block_start", index=index, content_block=begun)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ended = {"stop_reason": response["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", delta=ended, usage=response["usage"])
    yield _event("message_stop")


def _in_parts(block: Json) -> tuple[Json, Json]:
    """How a block begins, and all that it holds."""
    if block["type"] == "tool_use":
        whole = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        return {**block, "input": {}}, whole
    if block["type"] == "thinking":
        return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
    return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def _messages(message: Json) -> list[Json]:
    """One of Anthropic's is several of OpenAI's where it holds results of tools."""
    blocks = message.get("content")
    if isinstance(blocks, str):
        return [{"role": message["role"], "content": blocks}]
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise ValueError("the content of a message must be text or a list of blocks")
    told: list[Json] = []
    one: Json = {"role": message["role"], "content": ""}
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            one["content"] += str(block.get("text", ""))
        elif kind == "thinking":
            one["reasoning_content"] = str(block.get("thinking", ""))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
            call = {"id": block.get("id"), "type": "function", "function": function}
            one.setdefault("tool_calls", []).append(call)
        elif kind == "tool_result":
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
            told.append({**result, "content": _text(block.get("content"))})
        else:
            raise ValueError(f"blocks of type `{kind}` are not supported")
    return [*told, one] if one["content"] or one.get("tool_calls") or not told else told


def _text(content: object) -> str:
    if isinstance(content, list):
        require_texts([{"content": content}])
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""


def _tool(tool: object) -> Json:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise ValueError("a tool must have a name and an input_schema")
    function = {"name": tool["name"], "description": tool.get("description", "")}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _loaded(arguments: str) -> Any:
    try:
        return parse_json(arguments)
    except ValueError:
        return {"arguments": arguments}
