"""Represents OpenAI's requests and responses as plain data: chat completions, completions, and the
form with token ids. Pure; `proxy` handles HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from milescli.core.types import StopReason
from milescli.data.images import PARTS, source_in
from milescli.rollout.base import Reply, Turn

MESSAGE_PARTS = ("reasoning_content", "content")
"""Texts of a message, in the order in which they are sampled."""
_CONSTRAINED = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *("json_schema", "regex", "ebnf"),
)
"""Fields of SGLang and vLLM that constrain sampling."""
SAMPLING = (
    *("temperature", "top_p", "top_k", "seed"),
    *("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
)
"""Sampling fields of a request. `milescli.rollout.base.GenerateRequest` has the first four."""
_UNSUPPORTED = (
    *("logit_bias", "functions", "function_call", "web_search_options", "audio"),
    *("echo", "suffix"),
)


def require_supported(body: Body) -> None:
    """Raise ValueError for features of OpenAI's forms that are not supported."""
    form = body.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type", "text") != "text"):
        raise ValueError("`response_format` must be text, because sampling is not constrained")
    if constrained := next((key for key in _CONSTRAINED if body.get(key)), None):
        raise ValueError(f"`{constrained}` is not supported, because sampling is not constrained")
    if constrained := next((key for key in _UNSUPPORTED if body.get(key)), None):
        raise ValueError(f"`{constrained}` is not supported")
    best_of = body.get("best_of")
    if best_of is not None and best_of != (body.get("n") or 1):
        raise ValueError(
            "`best_of` is not supported: `n` responses are sampled and all of them returned"
        )
    most = max(_number(body.get("top_logprobs")), _number(body.get("logprobs")) - 1)
    if most > 0:
        raise ValueError(
            "`top_logprobs` are not supported; only the log-probs of sampled tokens are"
        )
    if body.get("modalities") not in (None, [], ["text"]):
        raise ValueError("`modalities` must be text")


def require_texts(messages: list[Any], *, but: Collection[str] = ()) -> None:
    """Raise ValueError if a message has a part that is not text and would be dropped. Images are
    allowed if their part's type is in `but`."""
    for message in messages:
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and part.get("type") in but and source_in(part):
                continue
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise ValueError(f"parts of type `{kind}` are not supported, only text")


def _number(value: object) -> int:
    return value if type(value) is int else 0


MAX_CHOICES = 128
"""Largest number of choices of one request."""
Body = Mapping[str, Any]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """Holds one parsed request. The recipe decides how tokens are sampled, whatever a client sends,
    except with `miles serve`."""

    messages: Sequence[Json] = ()
    tools: Sequence[Json] = ()
    prompt: str | list[int] = ""
    """Prompt of a request without messages: text or token ids."""
    num_choices: int = 1
    max_new_tokens: int | None = None
    stop: list[str] | None = None
    streams: bool = False
    wants_logprobs: bool = False
    wants_token_ids: bool = False
    wants_usage: bool = False
    """True if the request wants the usage at the end of the stream."""
    sampling: Json = field(default_factory=dict)
    """Sampling fields of the request (`SAMPLING`), unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Holds one choice of a response."""

    turn: Turn
    pieces: Sequence[str] = field(default=())
    """[num_response_tokens] text of each token, if log-probs are requested."""
    reply: Reply | None = None
    """Reply of a chat."""

    @property
    def finish_reason(self) -> str:
        """Return OpenAI's name of the finish reason."""
        if self.turn.stop_reason is StopReason.LENGTH:
            return "length"
        return "tool_calls" if self.reply is not None and self.reply.calls else "stop"


def parse_chat_request(body: Body) -> ModelRequest:
    """Parse a request of /v1/chat/completions. Raises ValueError if it is invalid or not
    supported."""
    messages = list_at(body, "messages")
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError("`messages` must be a non-empty list of messages")
    require_texts(messages, but=PARTS)
    choice, tools = body.get("tool_choice") or "auto", list_at(body, "tools")
    if choice == "none":
        tools = []
    elif choice != "auto":
        raise ValueError("`tool_choice` must be auto or none, because sampling is not constrained")
    most = _count(body, "max_completion_tokens") or _count(body, "max_tokens")
    return ModelRequest(messages=messages, tools=tools, max_new_tokens=most, **_common(body))


def parse_completion_request(body: Body) -> ModelRequest:
    """Parse a request of /v1/completions. Raises ValueError if it is invalid or not supported."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if not isinstance(prompt, str) and not _is_ids(prompt):
        raise ValueError("`prompt` must be one text or token ids")
    if body.get("stream"):
        raise ValueError("`stream` is not supported here: use /v1/chat/completions")
    most = _count(body, "max_tokens")
    return ModelRequest(prompt=prompt or [], max_new_tokens=most, **_common(body))


def parse_token_request(body: Body) -> ModelRequest:
    """Parse a request of /inference/v1/generate. Raises ValueError if it is invalid or not
    supported."""
    ids, sampling = body.get("token_ids"), body.get("sampling_params") or {}
    if not _is_ids(ids) or not isinstance(sampling, dict):
        raise ValueError("`token_ids` must be token ids, and `sampling_params` an object")
    if body.get("stream"):
        raise ValueError("`stream` is not supported here")
    return ModelRequest(
        prompt=list(ids or []), max_new_tokens=_count(sampling, "max_tokens"), **_common(sampling)
    )


def _common(body: Body) -> dict[str, Any]:
    require_supported(body)
    stop, options = body.get("stop"), body.get("stream_options") or {}
    if isinstance(stop, str):
        stop = [stop]
    if stop is not None and not is_texts(stop):
        raise ValueError("`stop` must be one text or several")
    num_choices = _count(body, "n") or 1
    if num_choices > MAX_CHOICES:
        raise ValueError(f"`n` must be at most {MAX_CHOICES}")
    return {
        "num_choices": num_choices,
        "stop": stop or None,
        "streams": bool(body.get("stream")),
        "wants_logprobs": body.get("logprobs") not in (None, False),
        "wants_token_ids": bool(body.get("return_token_ids")),
        "wants_usage": isinstance(options, dict) and bool(options.get("include_usage")),
        "sampling": sampling_of(body),
    }


def is_texts(value: object) -> bool:
    """Return True if the value is a list of texts that are not empty."""
    return isinstance(value, list) and all(isinstance(text, str) and text for text in value)


def sampling_of(body: Body) -> Json:
    """Return the sampling fields of a request, without those that are null."""
    return {key: body[key] for key in SAMPLING if body.get(key) is not None}


def list_at(body: Body, key: str) -> list[Any]:
    """Return a list of a request, empty if there is none. Raises ValueError if it is no list."""
    value = body.get(key) or []
    if not isinstance(value, list):
        raise ValueError(f"`{key}` must be a list")
    return value


def _count(body: Body, key: str) -> int | None:
    value = body.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"`{key}` must be a whole number of at least 1")
    return value


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def chat_response(
    request: ModelRequest, answered: Sequence[Choice], *, model: str, number: str
) -> Json:
    """Return the response of /v1/chat/completions."""
    choices = []
    for index, answer in enumerate(answered):
        assert answer.reply is not None, "a chat has replies"
        choice: Json = {
            "index": index,
            "message": dict(answer.reply.message),
            "finish_reason": answer.finish_reason,
            "logprobs": {"content": _logprobs(answer)} if request.wants_logprobs else None,
        }
        if request.wants_token_ids:
            choice |= _token_ids(answer)
        choices.append(choice)
    return {
        **_head("chat.completion", f"chatcmpl-{number}", model),
        "choices": choices,
        "usage": usage(answered),
    }


class Events:
    """Tracks how much of a message a stream of server-sent events has sent, so that its end sends
    the rest. The texts in `MESSAGE_PARTS` are sent in pieces while they are sampled; everything
    else, and texts that were never sent in pieces, comes at the end."""

    def __init__(self) -> None:
        """Begin with nothing sent."""
        self._sent = dict.fromkeys(MESSAGE_PARTS, "")

    @property
    def has_begun(self) -> bool:
        """Return True if a piece was sent."""
        return any(self._sent.values())

    def _rest(self, part: str, whole: str) -> str:
        """Return the part of `whole` that was not sent; the pieces sent may lack its leading
        blanks."""
        sent = self._sent[part]
        whole = whole if whole.startswith(sent) else whole.lstrip()
        return whole[len(sent) :] if whole.startswith(sent) else ""


class ChatEvents(Events):
    """Writes the events of /v1/chat/completions."""

    def __init__(self, *, model: str, number: str, wants_usage: bool) -> None:
        """Set the model and the request number that the events contain; with `wants_usage`, the
        last one has the token counts."""
        super().__init__()
        self._head = _head("chat.completion.chunk", f"chatcmpl-{number}", model)
        self._wants_usage = wants_usage

    def piece(self, part: str, text: str) -> Iterator[str]:
        """Yield the event for a piece of the only choice."""
        role = {} if self.has_begun else {"role": "assistant"}
        self._sent[part] += text
        yield self._chunk(0, delta={**role, part: text}, logprobs=None, finish_reason=None)

    def end(self, response: Json) -> Iterator[str]:
        """Yield the events for the rest of `chat_response`."""
        for choice in response["choices"]:
            message, index = {**choice["message"]}, choice["index"]
            for part in MESSAGE_PARTS if self.has_begun else ():
                message.pop("role", None)
                if part in message:
                    message[part] = self._rest(part, message[part])
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [{**call, "index": n} for n, call in enumerate(calls)]
            delta = {**choice, "delta": message, "finish_reason": None}
            del delta["message"], delta["index"]
            yield self._chunk(index, **delta)
            yield self._chunk(index, delta={}, finish_reason=choice["finish_reason"])
        if self._wants_usage:
            yield _event({**self._head, "choices": [], "usage": response["usage"]})
        yield "data: [DONE]\n\n"

    def failed(self, message: str) -> Iterator[str]:
        """Yield the event that ends the stream with an error."""
        yield _event(error(message, kind="server_error"))

    def _chunk(self, index: int, **fields: Any) -> str:
        return _event({**self._head, "choices": [{"index": index, **fields}]})


def text_response(
    request: ModelRequest, answered: Sequence[Choice], *, model: str, number: str
) -> Json:
    """Return the response of /v1/completions."""
    choices: list[Json] = []
    for index, answer in enumerate(answered):
        choice: Json = {
            "index": index,
            "text": answer.turn.text,
            "finish_reason": answer.finish_reason,
            "logprobs": None,
        }
        if request.wants_logprobs:
            choice["logprobs"] = {
                "tokens": list(answer.pieces),
                "token_logprobs": list(answer.turn.logprobs),
                "top_logprobs": None,
                "text_offset": None,
            }
        if request.wants_token_ids:
            choice |= _token_ids(answer)
        choices.append(choice)
    head = _head("text_completion", f"cmpl-{number}", model)
    return {**head, "choices": choices, "usage": usage(answered)}


def ids_response(answered: Sequence[Choice], *, number: str) -> Json:
    """Return the response of /inference/v1/generate."""
    return {
        "request_id": number,
        "choices": [
            {
                "index": index,
                "token_ids": answer.turn.response_ids,
                "finish_reason": answer.finish_reason,
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}
                        for token, logprob in zip(
                            answer.turn.response_ids, answer.turn.logprobs, strict=True
                        )
                    ]
                },
            }
            for index, answer in enumerate(answered)
        ],
        "usage": usage(answered),
    }


def models(name: str, *, max_model_len: int) -> Json:
    """Return the response of /v1/models."""
    one = {"id": name, "object": "model", "created": 0, "owned_by": "miles"}
    return {"object": "list", "data": [{**one, "max_model_len": max_model_len}]}


def error(message: str, *, kind: str, code: str | None = None) -> Json:
    """Return the response of any request that failed."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def usage(answered: Sequence[Choice]) -> Json:
    """Return the token counts; a prompt counts once."""
    prompt = max(len(answer.turn.prompt_ids) for answer in answered)
    sampled = sum(len(answer.turn.response_ids) for answer in answered)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


def _token_ids(answer: Choice) -> Json:
    return {
        "prompt_token_ids": list(answer.turn.prompt_ids),
        "token_ids": answer.turn.response_ids,
    }


def _logprobs(answer: Choice) -> list[Json]:
    return [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logprob in zip(answer.pieces, answer.turn.logprobs, strict=True)
    ]


def _head(kind: str, number: str, model: str) -> Json:
    return {"id": number, "object": kind, "created": int(time.time()), "model": model}


def _event(data: Json) -> str:
    return f"data: {json.dumps(data)}\n\n"
