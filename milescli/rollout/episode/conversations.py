"""Encodes a chat turn by turn: the policy's turns keep the token ids that it sampled, and only new
messages are rendered and tokenised. Needs no engine; `session` calls it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from milescli.core.types import Image, ImageSpan, StopReason
from milescli.data.images import MARK, PARTS, as_parts
from milescli.data.tokenizer import STAND_IN, ChatTokenizer
from milescli.rollout.base import Parsed, Turn

Message = Mapping[str, Any]
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that clients leave out when they send it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the policy is asked."""

    token_ids: list[int]
    """[num_prompt_tokens]"""
    text: str
    """As the template writes it; in `token_ids` the policy's own turns are as it wrote them."""
    messages: list[dict[str, Any]]
    """With the policy's own turns as it said them."""
    tools: Sequence[Message]
    image_spans: Sequence[ImageSpan] = ()
    """Where images stand in `token_ids`."""
    is_rewritten: bool = False
    """The template writes earlier turns otherwise than the policy saw and said them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """Holds a conversation up to a turn of the policy, which is its last message."""

    messages: list[dict[str, Any]]
    tools: str
    prompt: str
    """What stands before the turn, as the template writes it."""
    response: str
    """Text of the turn's tokens, without the one that ended it."""
    ending: str
    """Text of that one; empty where the turn was cut off."""
    token_ids: list[int]
    """All of them."""
    image_spans: Sequence[ImageSpan] = ()


@dataclass(slots=True, kw_only=True)
class Conversations:
    """Holds the conversations of one sample. They form a tree: any turn can be continued."""

    tokenizer: ChatTokenizer
    images: Sequence[Image] = ()
    """Images of the prompt: its messages have a mark for each."""
    _said: list[_Said] = field(default_factory=list)

    def asked(self, messages: Sequence[Message], tools: Sequence[Message]) -> Asked:
        """Raises what the template raises."""
        known = [_normal(message) for message in messages]
        before = self._latest(known, json.dumps(list(tools)))
        whole = [*before.messages, *known[len(before.messages) :]] if before else known
        text = self.tokenizer.render(self._for_template(whole), tools=tools)
        added = self._added(before, whole, tools, text=text) if before else text
        if before is None or added is None:
            token_ids, spans = self._shown(self.tokenizer.encode_text(text))
        else:
            token_ids = [*before.token_ids, *self.tokenizer.encode_more(added)]
            spans = before.image_spans
        return Asked(
            token_ids=token_ids,
            image_spans=spans,
            text=text,
            messages=whole,
            tools=tools,
            is_rewritten=added is None,
        )

    def _shown(self, token_ids: list[int]) -> tuple[list[int], Sequence[ImageSpan]]:
        """Return the tokens with all those of the prompt's images, and where these stand. Raises
        ValueError if the messages show other images than the prompt."""
        sees = self.tokenizer.images
        if not self.images or sees is None:
            return token_ids, ()
        num_shown = token_ids.count(sees.token_id)
        ids, spans, _ = sees.expanded(token_ids, self.images if num_shown else ())
        return ids, spans

    def remember(self, asked: Asked, turn: Turn, message: Message) -> None:
        """The policy's turn, and the message that it was told as."""
        response, ending = self.parted(turn)
        self._said.append(
            _Said(
                messages=[*asked.messages, _normal(message)],
                tools=json.dumps(list(asked.tools)),
                prompt=asked.text,
                response=response,
                ending=ending,
                token_ids=[*turn.prompt_ids, *turn.response_ids],
                image_spans=asked.image_spans,
            )
        )

    def parted(self, turn: Turn) -> tuple[str, str]:
        """Return a response's text with its special tokens, and the special token that ended it, or
        an empty text."""
        ids, last = turn.response_ids, turn.response_ids[-1]
        if turn.stop_reason is StopReason.STOP and last in self.tokenizer.special_ids:
            return self._text(ids[:-1]), self._text(ids[-1:])
        return self._text(ids), ""

    def _latest(self, messages: list[dict[str, Any]], tools: str) -> _Said | None:
        """The longest conversation that the messages go on with; of equal ones the last."""
        found: _Said | None = None
        for said in self._said:
            length = len(said.messages)
            is_longer = found is None or length >= len(found.messages)
            if (
                is_longer
                and length < len(messages)
                and said.tools == tools
                and all(map(_is_same, messages[:length], said.messages))
            ):
                found = said
        return found

    def _added(
        self, before: _Said, whole: list[dict[str, Any]], tools: Sequence[Message], *, text: str
    ) -> str | None:
        """What follows the tokens of `before` in `text`, the rendering of `whole`; None where it
        does not begin with what they say."""
        said = before.prompt + before.response + before.ending
        if text.startswith(said):
            return text[len(said) :]
        if not text.startswith(before.prompt):
            return None
        place = len(before.messages) - 1
        stand_in = {"role": whole[place]["role"], "content": STAND_IN}
        probe = self._for_template([*whole[:place], stand_in, *whole[place + 1 :]])
        _, found, after = self.tokenizer.render(probe, tools=tools).partition(STAND_IN)
        if not found or not text.endswith(after) or not after.startswith(before.ending):
            return None
        shown = text[len(before.prompt) : len(text) - len(after)]
        # the family may write a call with other spaces than the model did: its own tokens stand
        if _without_spaces(shown) != _without_spaces(before.response):
            return None
        return after[len(before.ending) :]

    def _for_template(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """As chat templates take them: arguments of calls as mappings, images as parts."""
        known = [
            {**message, "tool_calls": [_call_for_template(call) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else dict(message)
            for message in messages
        ]
        return as_parts(known) if self.images else known

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.inner.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


def told_as(parsed: Parsed, *, number: int) -> dict[str, Any]:
    """The message of a turn. `number`: of the first call, within the sample; by it the results of
    calls are told apart."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {
                "id": f"call_{number + place}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in enumerate(parsed.calls)
        ]
    return message


def _normal(message: Message) -> dict[str, Any]:
    """One form of what clients write in several. Raises ValueError for what is no message."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message must have a role and content; this is {message!r:.200}")
    known = {key: value for key, value in message.items() if value is not None}
    content = known.get("content", "")
    if isinstance(content, list):
        content = "".join(
            MARK if part.get("type") in PARTS else str(part.get("text", "")) for part in content
        )
    return {**known, "content": content}


def _is_same(one: Message, other: Message) -> bool:
    """Whether a client's message is the `other`, which we know."""
    if one["role"] != other["role"] or one["content"] != other["content"]:
        return False
    if _calls(one) != _calls(other):
        return False
    names = ("name", "tool_call_id")
    if one["role"] != "assistant" and any(one.get(key) != other.get(key) for key in names):
        return False
    return all(key not in one or one[key] == other.get(key) for key in _REASONING)


def _calls(message: Message) -> list[tuple[Any, Any]]:
    functions = [call.get("function", {}) for call in message.get("tool_calls") or []]
    return [(function.get("name"), _arguments(function)) for function in functions]


def _arguments(function: Message) -> Any:
    """As a mapping, where they are one."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _call_for_template(call: Message) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _arguments(function)}}


def _without_spaces(text: str) -> str:
    return "".join(text.split())
