"""Converts Anthropic's messages to OpenAI's, and back. Pure; `proxy` speaks HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from milescli.agents.openai_forms import (
    Choice,
    Events,
    Json,
    ModelRequest,
    is_texts,
    list_at,
    require_texts,
    sampling_of,
    usage,
)
from milescli.core.files import parse_json

_ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def parse_messages_request(body: Mapping[str, Any]) -> ModelRequest:
    """Parse a request of /v1/messages. Raises ValueError if it is invalid or not supported."""
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
    if stop is not None and not is_texts(stop):
        raise ValueError("`stop_sequences` must be texts")
    return ModelRequest(
        messages=messages,
        tools=[_tool(tool) for tool in list_at(body, "tools")] if wanted == "auto" else [],
        max_new_tokens=most,
        stop=stop or None,
        streams=bool(body.get("stream")),
        sampling=sampling_of(body),
    )


def message_response(answered: Choice, *, model: str, number: str) -> Json:
    """Return the response of /v1/messages."""
    assert answered.reply is not None, "a chat has replies"
    message = answered.reply.message
    content = [_block(part, message[part]) for part in _BLOCKS if message.get(part)]
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        used = {"type": "tool_use", "id": call["id"], "name": name, "input": _loaded(arguments)}
        content.append(used)
    counts = usage([answered])
    return {
        **_head(model=model, number=number),
        "content": content,
        "stop_reason": _ENDS[answered.finish_reason],
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "output_tokens": counts["completion_tokens"],
        },
    }


_BLOCKS = {"reasoning_content": "thinking", "content": "text"}
"""Part of a message -> type of its content block, whose text field has the same name."""


class MessageEvents(Events):
    """Writes the events of /v1/messages."""

    def __init__(self, *, model: str, number: str) -> None:
        """Set the model and the request number that the events contain."""
        super().__init__()
        self._head = _head(model=model, number=number)
        self._num_blocks = 0
        self._open: str | None = None
        """Part of the message whose block is being sent."""

    def piece(self, part: str, text: str) -> Iterator[str]:
        """Yield the events for a piece of a content block."""
        if not self.has_begun:
            # how many tokens the prompt has is told at the end
            usage = {"input_tokens": 0, "output_tokens": 0}
            yield _event("message_start", message={**self._head, "usage": usage})
        self._sent[part] += text
        block = _block(part, text)
        if part != self._open:
            yield from self._close()
            yield self._begin(block)
            self._open = part
        yield self._delta(block)

    def end(self, response: Json) -> Iterator[str]:
        """Yield the events for the rest of `message_response`."""
        if not self.has_begun:
            yield _event("message_start", message={**self._head, "usage": response["usage"]})
        part_of = {kind: part for part, kind in _BLOCKS.items()}
        for block in response["content"]:
            part = part_of.get(block["type"])
            if part is not None and self._sent[part]:
                if part == self._open and (rest := self._rest(part, block[block["type"]])):
                    yield self._delta(_block(part, rest))
                continue
            yield from self._close()
            yield self._begin(block)
            yield self._delta(block)
            yield self._stop()
        yield from self._close()
        ended = {"stop_reason": response["stop_reason"], "stop_sequence": None}
        yield _event("message_delta", delta=ended, usage=response["usage"])
        yield _event("message_stop")

    def failed(self, message: str) -> Iterator[str]:
        """Yield the event that ends the stream with an error."""
        yield _event("error", error={"type": "api_error", "message": message})

    def _begin(self, block: Json) -> str:
        head, _ = _in_parts(block)
        return _event("content_block_start", index=self._num_blocks, content_block=head)

    def _delta(self, block: Json) -> str:
        _, delta = _in_parts(block)
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _stop(self) -> str:
        self._num_blocks += 1
        return _event("content_block_stop", index=self._num_blocks - 1)

    def _close(self) -> Iterator[str]:
        if self._open is not None:
            self._open = None
            yield self._stop()


def _block(part: str, text: str) -> Json:
    kind = _BLOCKS[part]
    signed = {"signature": ""} if kind == "thinking" else {}
    return {"type": kind, kind: text, **signed}


def _head(*, model: str, number: str) -> Json:
    """Return a message before anything is sampled."""
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _in_parts(block: Json) -> tuple[Json, Json]:
    """Return (the block with empty content, the content)."""
    if block["type"] == "tool_use":
        whole = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        return {**block, "input": {}}, whole
    if block["type"] == "thinking":
        return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
    return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def _messages(message: Json) -> list[Json]:
    """Convert one of Anthropic's messages, to several of OpenAI's if it has results of tools."""
    blocks = message.get("content")
    if isinstance(blocks, str):
        return [{"role": message["role"], "content": blocks}]
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise ValueError("the content of a message must be text or a list of blocks")
    converted: list[Json] = []
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
            converted.append({**result, "content": _text(block.get("content"))})
        else:
            raise ValueError(f"blocks of type `{kind}` are not supported")
    return (
        [*converted, one] if one["content"] or one.get("tool_calls") or not converted else converted
    )


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
