"""OpenAI's `/v1/responses` as plain data: converts items to the messages that a session knows, and
its replies to items and events. Pure, except for the store of a session's responses; `proxy` speaks
HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from milescli.agents.openai_forms import (
    Body,
    Choice,
    Events,
    Json,
    ModelRequest,
    list_at,
    sampling_of,
    usage,
)

MAX_STORED = 256
"""Number of the newest responses of one session that a request can continue by their id."""
_ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text")
_UNSUPPORTED = ("background", "conversation", "prompt")
"""Fields that require more than one turn of the policy."""


class UnknownResponse(ValueError):
    """Reports that a request continues a response that its session does not have."""


@dataclass(slots=True)
class StoredResponses:
    """Holds the conversations of one session, by the id of the response that ends each."""

    _messages: dict[str, Sequence[Json]] = field(default_factory=dict)

    def add(self, name: str, messages: Sequence[Json]) -> None:
        """Store a conversation, and drop the oldest one if there are too many."""
        self._messages[name] = messages
        while len(self._messages) > MAX_STORED:
            self._messages.pop(next(iter(self._messages)))

    def up_to(self, name: str) -> Sequence[Json]:
        """Return the messages up to a response, and the response. Raises UnknownResponse."""
        if name not in self._messages:
            raise UnknownResponse(
                f"this session keeps no response `{name}`: it has the last {MAX_STORED} that were "
                "asked for without `store: false`"
            )
        return self._messages[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ModelRequest):
    """Holds one parsed request, and the fields that its response repeats."""

    history: Sequence[Json]
    """`messages` without the instructions, which apply to one request alone."""
    is_stored: bool
    """True if later requests can continue the response by its id."""
    repeated: Json
    """Fields of the response that repeat the request."""


def parse_responses_request(body: Body, stored: StoredResponses) -> ResponsesRequest:
    """Parse a request of /v1/responses. Raises ValueError if it is invalid or not supported, and
    UnknownResponse."""
    if unserved := next((key for key in _UNSUPPORTED if body.get(key)), None):
        raise ValueError(f"`{unserved}` is not supported")
    if not _is_plain_text(body.get("text")):
        raise ValueError("`text.format` must be text, because sampling is not constrained")
    instructions, previous = _text_or_none(body, "instructions"), body.get("previous_response_id")
    before = () if previous is None else stored.up_to(str(previous))
    history = [*before, *_messages(body.get("input"), before)]
    system = [{"role": "system", "content": instructions}] if instructions else []
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise ValueError("`tool_choice` must be auto or none, because sampling is not constrained")
    tools = list_at(body, "tools")
    tools_for_chat = [_tool(tool) for tool in tools]
    most = body.get("max_output_tokens")
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError("`max_output_tokens` must be a whole number of at least 1")
    return ResponsesRequest(
        messages=[*system, *history],
        history=history,
        tools=tools_for_chat if choice == "auto" else [],
        max_new_tokens=most,
        streams=bool(body.get("stream")),
        sampling=sampling_of(body),
        is_stored=body.get("store") is not False,
        repeated={
            "instructions": instructions,
            "max_output_tokens": most,
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": True,
            "previous_response_id": previous,
            "tool_choice": choice,
            "tools": tools,
        },
    )


def response(request: ResponsesRequest, answered: Choice, *, model: str, number: str) -> Json:
    """Return the response of /v1/responses."""
    counts, is_cut = usage([answered]), answered.finish_reason == "length"
    return {
        **_head(request, model=model, number=number),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(answered, number),
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        },
    }


def _head(request: ResponsesRequest, *, model: str, number: str) -> Json:
    """Return the fields of a response before anything is sampled."""
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **request.repeated,
    }


class ResponseEvents(Events):
    """Writes the events of /v1/responses."""

    def __init__(self, request: ResponsesRequest, *, model: str, number: str) -> None:
        """Write events for this model and request number."""
        super().__init__()
        self._head = _head(request, model=model, number=number)
        self._number = number
        self._num_events = self._num_items = 0
        self._open: str | None = None
        """Part of the message whose item is being sent."""

    def piece(self, part: str, text: str) -> Iterator[str]:
        """Yield the events for a piece of an item."""
        if not self.has_begun:
            yield from self._begin()
        if part != self._open:
            yield from self._close()
            yield from self._added(_text_item(part, "", self._number))
            self._open = part
        self._sent[part] += text
        yield from self._delta(_text_item(part, text, self._number))

    def end(self, whole: Json) -> Iterator[str]:
        """Yield the events for the rest of `response`."""
        if not self.has_begun:
            yield from self._begin()
        for item in whole["output"]:
            part = _PART_OF.get(item["type"])
            if part is not None and self._sent[part]:
                if part == self._open:
                    rest = self._rest(part, item["content"][0]["text"])
                    yield from self._delta(_text_item(part, rest, self._number)) if rest else ()
                    yield from self._done(item)
                continue
            yield from self._close()
            yield from self._added(item)
            yield from self._delta(item)
            yield from self._done(item)
        yield from self._close()
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, message: str) -> Iterator[str]:
        """Yield the event that ends the stream with an error."""
        yield self._event("error", code="server_error", message=message, param=None)

    def _begin(self) -> Iterator[str]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._head)

    def _close(self) -> Iterator[str]:
        if self._open is not None:
            yield from self._done(_text_item(self._open, self._sent[self._open], self._number))

    def _added(self, item: Json) -> Iterator[str]:
        empty = {**item, "arguments": ""} if "arguments" in item else {**item, "content": []}
        if "status" in item:
            empty["status"] = "in_progress"
        yield self._event("response.output_item.added", output_index=self._num_items, item=empty)
        if "content" in item:
            (part,) = item["content"]
            yield self._placed("response.content_part.added", item, part={**part, "text": ""})

    def _delta(self, item: Json) -> Iterator[str]:
        if "arguments" in item:
            name = "response.function_call_arguments.delta"
            yield self._placed(name, item, delta=item["arguments"])
            return
        (part,) = item["content"]
        name, more = f"response.{part['type']}.delta", _more(part)
        yield self._placed(name, item, delta=part["text"], **more)

    def _done(self, item: Json) -> Iterator[str]:
        if "arguments" in item:
            call = {"name": item["name"], "arguments": item["arguments"]}
            yield self._placed("response.function_call_arguments.done", item, **call)
        else:
            (part,) = item["content"]
            name, more = f"response.{part['type']}.done", _more(part)
            yield self._placed(name, item, text=part["text"], **more)
            yield self._placed("response.content_part.done", item, part=part)
        yield self._event("response.output_item.done", output_index=self._num_items, item=item)
        self._open = None
        self._num_items += 1

    def _placed(self, name: str, item: Json, /, **fields: Any) -> str:
        inside = {"content_index": 0} if "content" in item else {}
        place = {"output_index": self._num_items, "item_id": item["id"]}
        return self._event(name, **place, **inside, **fields)

    def _event(self, name: str, /, **fields: Any) -> str:
        fields_of_event = {"type": name, **fields, "sequence_number": self._num_events}
        self._num_events += 1
        return f"event: {name}\ndata: {json.dumps(fields_of_event)}\n\n"


_PART_OF = {"reasoning": "reasoning_content", "message": "content"}
"""Type of an item -> part of a message."""


def _more(part: Json) -> Json:
    return {"logprobs": []} if "logprobs" in part else {}


def _text_item(part: str, text: str, number: str, *, status: str = "completed") -> Json:
    """Return the item for one part of a message."""
    if part == "reasoning_content":
        content = [{"type": "reasoning_text", "text": text}]
        return {"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": content}
    text_part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [text_part],
    }


def _items(answered: Choice, number: str) -> list[Json]:
    """Return the items of one turn: its reasoning, its text, its calls. There is always a text or a
    call, so that turns can be told apart when items come back."""
    assert answered.reply is not None, "a response has a reply"
    message, items = answered.reply.message, list[Json]()
    calls = message.get("tool_calls") or ()
    if thought := message.get("reasoning_content"):
        items.append(_text_item("reasoning_content", thought, number))
    if message["content"] or not calls:
        status = "incomplete" if answered.finish_reason == "length" else "completed"
        items.append(_text_item("content", message["content"], number, status=status))
    items += [
        {
            "id": f"fc_{number}_{place}",
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
        }
        for place, call in enumerate(calls)
    ]
    return items


def _messages(given: object, before: Sequence[Json]) -> list[Json]:
    """Convert `input`, which continues `before`. The items of one turn become one message."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise ValueError("`input` must be text or a list of items")
    if not given:
        raise ValueError("`input` is empty")
    known = {call["id"] for message in before for call in message.get("tool_calls") or ()}
    messages: list[Json] = []
    for item in given:
        kind, call_id = str(item.get("type") or "message"), str(item.get("call_id"))
        if kind not in _READ:
            raise ValueError(f"items of type `{kind}` are not supported")
        if kind == "function_call_output" and call_id not in known:
            raise ValueError(f"no function_call before it has the call_id `{call_id}`")
        _READ[kind](item, messages)
        if kind == "function_call":
            known.add(call_id)
    return [{**message, "content": message.get("content", "")} for message in messages]


def _read_message(item: Json, messages: list[Json]) -> None:
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise ValueError(f"a message must have content and a role, one of {', '.join(_ROLES)}")
    content = _text(item.get("content"), "the content of a message", kinds=_TEXTS)
    if role == "assistant":
        _current_turn(messages)["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _read_reasoning(item: Json, messages: list[Json]) -> None:
    parts = item.get("content") or item.get("summary") or []
    text = _text(parts, "a reasoning", kinds=("reasoning_text", "summary_text"))
    turn = _current_turn(messages)
    if text:  # many clients leave it out
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text


def _read_call(item: Json, messages: list[Json]) -> None:
    if not all(isinstance(item.get(key), str) for key in ("call_id", "name", "arguments")):
        raise ValueError(
            "a function_call must have a call_id, a name and arguments, all of them text"
        )
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _read_output(item: Json, messages: list[Json]) -> None:
    output = _text(item.get("output"), "the output of a function_call", kinds=_TEXTS)
    messages.append({"role": "tool", "tool_call_id": str(item["call_id"]), "content": output})


_READ: Mapping[str, Callable[[Json, list[Json]], None]] = {
    "message": _read_message,
    "reasoning": _read_reasoning,
    "function_call": _read_call,
    "function_call_output": _read_output,
}


def _current_turn(messages: list[Json]) -> Json:
    """Return the policy's turn to extend: the last message if it has only reasoning so far, else a
    new one."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or "content" in last or "tool_calls" in last:
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: object, what: str, *, kinds: Sequence[str]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ValueError(f"{what} must be text or a list of parts")
    for part in content:
        if part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise ValueError(f"parts of type `{part.get('type')}` are not supported")
    return "".join(part["text"] for part in content)


def _is_plain_text(form: object) -> bool:
    """Return True if the field `text` of a request requires no format that would constrain
    sampling."""
    wanted = form.get("format") if isinstance(form, dict) else form
    return wanted is None or (isinstance(wanted, dict) and wanted.get("type", "text") == "text")


def _text_or_none(body: Body, key: str) -> str | None:
    value = body.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"`{key}` must be text")
    return value


def _tool(tool: Any) -> Json:
    """Return a tool in the form of chat completions."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise ValueError(f"tools of type `{kind}` are not supported, only functions")
    if not isinstance(tool.get("name"), str):
        raise ValueError("a tool must have a name and parameters")
    known = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key)}
    return {"type": "function", "function": known}
