"""Encodes a chat turn by turn: the policy's turns keep the token ids that it sampled, and only new
messages are rendered and tokenised. Needs no engine; `session` calls it."""

from __future__ import annotations

import json
import weakref
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from milescli.core.files import parse_json
from milescli.core.types import Image, ImageSpan, StopReason
from milescli.data.images import DATA_URL, MARK, PARTS, Source, parts_of, source_in, text_of
from milescli.data.tokenizer import PLACEHOLDER, ChatTokenizer
from milescli.rollout.base import Parsed, Turn
from milescli.rollout.episode.shared_prefixes import (
    Prefix,
    SharedPrefixes,
    SharedTexts,
    text_of_prefix,
)

Message = Mapping[str, Any]
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys that clients drop when they send a message back."""
OMITTED_IMAGE = "(image left out: the model does not accept images)"
"""Text that a model without images reads in place of an image."""
_SHARED_IMAGES: weakref.WeakValueDictionary[tuple[str, tuple[int, ...], int], Image] = (
    weakref.WeakValueDictionary()
)
"""Images in messages, by their hash and how the model cuts them: samples with the same image share
its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Holds the rendered prompt of one turn."""

    token_ids: list[int]
    """[num_prompt_tokens]"""
    text: str
    """Text as the template renders it; in `token_ids` the policy's own turns are the tokens that it
    sampled."""
    messages: list[dict[str, Any]]
    """Messages with the policy's own turns as it sampled them."""
    tools: Sequence[Message]
    image_spans: Sequence[ImageSpan] = ()
    """Positions of images in `token_ids`."""
    images: Sequence[Image] = ()
    """One for each span."""
    is_rewritten: bool = False
    """True if the template renders earlier turns differently from what the policy saw and sampled.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordedTurn:
    """Holds a conversation up to a turn of the policy, which is its last message."""

    messages: list[dict[str, Any]]
    tools: str
    prompt: Prefix[bytearray]
    """Text before the turn, as the template renders it."""
    response: str
    """Text of the turn's tokens, without the token that ended it."""
    ending: str
    """Text of the token that ended the turn; empty if the turn was truncated."""
    token_ids: Prefix[array[int]]
    """All tokens, prompt and response."""
    image_spans: Sequence[ImageSpan] = ()


@dataclass(slots=True, kw_only=True)
class Conversations:
    """Holds the conversations of one sample. They form a tree: any turn can be continued."""

    tokenizer: ChatTokenizer
    images: Sequence[Image] = ()
    """Images of the prompt: its messages have a mark for each."""
    _recorded: list[_RecordedTurn] = field(default_factory=list)
    _texts: SharedTexts = field(default_factory=SharedTexts)
    _tokens: SharedPrefixes[array[int]] = field(default_factory=SharedPrefixes)
    _read: dict[Source, Image] = field(default_factory=dict)
    """Images that messages hold."""
    _by_hash: dict[str, Image] = field(default_factory=dict)

    def has_unread(self, messages: Sequence[Message]) -> bool:
        """Return True if `read_images` would read an image."""
        return any(True for _ in self._unread(messages))

    def read_images(self, messages: Sequence[Message]) -> None:
        """Read the images that messages hold, which takes a while. Raises ValueError with the
        message whose image cannot be used."""
        sees = self.tokenizer.images
        assert sees is not None, "a model without images reads none"
        for message, source in self._unread(messages):
            try:
                if isinstance(source, str) and not DATA_URL.fullmatch(source):
                    raise ValueError(f"`{source:.80}` is not a data URL")
                image = sees.read(source, base=Path())
            except ValueError as error:
                names = [message.get(key) for key in ("role", "name")]
                who = " ".join(str(name) for name in names if name)
                raise ValueError(f"an image of the message of `{who}`: {error}") from error
            image = _SHARED_IMAGES.setdefault((image.sha256, image.grid, image.num_tokens), image)
            self._read[source] = self._by_hash[image.sha256] = image

    def _unread(self, messages: Sequence[Message]) -> Iterator[tuple[Message, Source]]:
        for message in messages if self.tokenizer.images is not None else ():
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                source = source_in(part) if part.get("type") in PARTS else None
                if source is not None and source not in self._read:
                    yield message, source

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Message]) -> ChatPrompt:
        """Return the prompt for the messages, after `read_images` has read their images. Raises
        what the template raises."""
        known = [self._normalized(message) for message in messages]
        before = self._longest_continued(known, json.dumps(list(tools)))
        whole = [*before.messages, *known[len(before.messages) :]] if before else known
        placed, images = self._with_images_placed(whole)
        text = self.tokenizer.render(placed, tools=tools)
        added = self._text_after(before, whole, tools, text=text) if before else text
        if before is None or added is None:
            token_ids, spans = self._expanded(self.tokenizer.encode_text(text), images)
        else:
            more = self.tokenizer.encode_continuation(added)
            more, new = self._expanded(more, images[len(before.image_spans) :])
            start = len(before.token_ids)
            token_ids = [*before.token_ids.items, *more]
            later = (replace(span, start=start + span.start) for span in new)
            spans = (*before.image_spans, *later)
        return ChatPrompt(
            token_ids=token_ids,
            image_spans=spans,
            images=images,
            text=text,
            messages=whole,
            tools=tools,
            is_rewritten=added is None,
        )

    def _expanded(
        self, token_ids: list[int], images: Sequence[Image]
    ) -> tuple[list[int], Sequence[ImageSpan]]:
        """Return the tokens with those of the images inserted, and where these are. Raises
        ValueError if the template rendered fewer images, or a text contains an image token."""
        sees = self.tokenizer.images
        if sees is None:
            return token_ids, ()
        ids, spans, _ = sees.expanded(token_ids, images)
        return ids, spans

    def record(self, prompt: ChatPrompt, turn: Turn, message: Message) -> None:
        """Record the policy's turn, and the message that its client received."""
        response, ending = self.split_ending(turn)
        self._recorded.append(
            _RecordedTurn(
                messages=[*prompt.messages, self._normalized(message)],
                tools=json.dumps(list(prompt.tools)),
                prompt=self._texts.add(prompt.text),
                response=response,
                ending=ending,
                token_ids=self._tokens.add(array("i", [*turn.prompt_ids, *turn.response_ids])),
                image_spans=prompt.image_spans,
            )
        )

    def split_ending(self, turn: Turn) -> tuple[str, str]:
        """Return (the response's text with its special tokens, the special token that ended it);
        the second is empty if the response was truncated."""
        ids, last = turn.response_ids, turn.response_ids[-1]
        if turn.stop_reason is StopReason.STOP and last in self.tokenizer.special_ids:
            return self.text(ids[:-1]), self.text(ids[-1:])
        return self.text(ids), ""

    def _longest_continued(
        self, messages: list[dict[str, Any]], tools: str
    ) -> _RecordedTurn | None:
        """Return the longest conversation that the messages continue; of equal ones the last."""
        found: _RecordedTurn | None = None
        for turn in self._recorded:
            length = len(turn.messages)
            is_longer = found is None or length >= len(found.messages)
            if (
                is_longer
                and length < len(messages)
                and turn.tools == tools
                and all(map(_is_same, messages[:length], turn.messages))
            ):
                found = turn
        return found

    def _text_after(
        self,
        before: _RecordedTurn,
        whole: list[dict[str, Any]],
        tools: Sequence[Message],
        *,
        text: str,
    ) -> str | None:
        """Return the text that follows the tokens of `before` in `text`, the rendering of `whole`;
        None if `text` does not begin with the text of these tokens."""
        prompt = text_of_prefix(before.prompt)
        seen = prompt + before.response + before.ending
        if text.startswith(seen):
            return text[len(seen) :]
        if not text.startswith(prompt):
            return None
        place = len(before.messages) - 1
        stand_in = {"role": whole[place]["role"], "content": PLACEHOLDER}
        probe, _ = self._with_images_placed([*whole[:place], stand_in, *whole[place + 1 :]])
        _, found, after = self.tokenizer.render(probe, tools=tools).partition(PLACEHOLDER)
        if not found or not text.endswith(after) or not after.startswith(before.ending):
            return None
        shown = text[len(prompt) : len(text) - len(after)]
        # the family may write a call with other spaces than the model did: its own tokens stand
        if _without_spaces(shown) != _without_spaces(before.response):
            return None
        return after[len(before.ending) :]

    def _with_images_placed(
        self, messages: Sequence[Message]
    ) -> tuple[list[dict[str, Any]], Sequence[Image]]:
        """Return the messages in the form of chat templates, with arguments of calls as mappings
        and images as parts, and the images in their order. The first marks in texts stand for the
        prompt's images; later marks, and those that the policy wrote, are text. Raises ValueError
        if only some of the prompt's images are shown."""
        waiting, images, placed = list(self.images), list[Image](), list[dict[str, Any]]()
        own = {turn.messages[-1]["content"] for turn in self._recorded}
        for message in messages:
            content = message["content"]
            if isinstance(content, str) and waiting and MARK in content and content not in own:
                content = parts_of(content, most=len(waiting))
            for part in content if isinstance(content, list) else ():
                if part["type"] == "image":
                    known = self._by_hash.get(part.get("sha256", ""))
                    if known is None and not waiting:
                        raise ValueError("a part of a message is an image, but holds none")
                    images.append(known or waiting.pop(0))
            placed.append({**message, "content": content})
            if calls := message.get("tool_calls"):
                placed[-1]["tool_calls"] = [_call_for_template(call) for call in calls]
        if 0 < len(waiting) < len(self.images):
            raise ValueError(f"{len(waiting)} of the prompt's {len(self.images)} images lack")
        return placed, images

    def _normalized(self, message: Message) -> dict[str, Any]:
        """Return a message in one form, whichever its client uses; images become parts with their
        hash. Raises ValueError for what is no message."""
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"a message must have a role and content; this is {message!r:.200}")
        known = {key: value for key, value in message.items() if value is not None}
        content = known.get("content", "")
        if isinstance(content, list):
            parts = [self._part(part) for part in content]
            holds = any("sha256" in part for part in parts)
            content = parts if holds else text_of(parts)
        return {**known, "content": content}

    def _part(self, part: Message) -> dict[str, str]:
        if part.get("type") not in PARTS:
            return {"type": "text", "text": str(part.get("text", ""))}
        if (source := source_in(part)) is None:
            return {"type": "image"}
        if self.tokenizer.images is None:
            return {"type": "text", "text": OMITTED_IMAGE}
        return {"type": "image", "sha256": self._read[source].sha256}

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        return str(
            self.tokenizer.inner.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


def reply_message(parsed: Parsed, *, number: int) -> dict[str, Any]:
    """Return the message of a parsed turn in OpenAI's form. `number`: number of its first tool call
    within the sample, from which the ids of calls are made."""
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


def _is_same(one: Message, other: Message) -> bool:
    """Return True if a client's message is the recorded message `other`."""
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
    """Return the arguments as a mapping, if they are one."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse_json(arguments)
    except ValueError:
        return arguments


def _call_for_template(call: Message) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _arguments(function)}}


def _without_spaces(text: str) -> str:
    return "".join(text.split())
