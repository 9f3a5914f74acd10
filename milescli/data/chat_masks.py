"""Tokenises chats for training, as trajectories that no engine sampled: the text of the chat
template, and the mask of the assistant's tokens. It hard-codes no special token of a model family:
if the template marks assistant text (`{% generation %}`), those marks count; otherwise it compares
renderings of the chat's prefixes."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milescli.core.types import Prompt, Trajectory
from milescli.data.tokenizer import STAND_IN, ChatTokenizer

Turn = Mapping[str, Any]
"""A message as chat templates take it: `role`, `content`, and what else a family knows (tool_calls,
reasoning_content, name)."""

_MARKS = re.compile(r"\{%-?\s*generation\b")
_TAIL = 4
"""Most tokens that a template writes behind the end of a turn."""
_TEXT_OF_TURN = ("content", "tool_calls", "reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedText:
    """Holds a text, and the parts of it that are learned."""

    text: str
    spans: list[tuple[int, int]]
    """[start, end) in characters, ascending."""
    ends_open: bool = False
    """True if nothing in the text ends it: the end-of-sequence token is added, and learned."""


def marked_chat(
    tokenizer: ChatTokenizer,
    turns: Sequence[Turn],
    *,
    first: int = 0,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> MarkedText:
    """Render a chat and mark what the assistant writes from turn `first` on, the end of its turns
    included. Raises ValueError if the template does not show where a turn begins and ends."""
    if _MARKS.search(tokenizer.template or ""):
        text, spans = tokenizer.render_marked(turns, tools=tools)
        start = len(tokenizer.render(turns[:first], tools=tools)) if first else 0
        spans = [span for span in spans if span[1] > start]
        return MarkedText(text=text, spans=spans, ends_open=_ends_open(tokenizer, text, spans))
    text = tokenizer.render(turns, tools=tools, opens_answer=False)
    spans = [
        _span_of(tokenizer, turns, place, text=text, tools=tools)
        for place in range(first, len(turns))
        if turns[place]["role"] == "assistant"
    ]
    spans = _joined(spans)
    return MarkedText(text=text, spans=spans, ends_open=_ends_open(tokenizer, text, spans))


def marked_response(prompt: str, response: str) -> MarkedText:
    """Append a response to a prompt, for models without a chat template, and mark the response."""
    text = prompt + response
    return MarkedText(text=text, spans=[(len(prompt), len(text))], ends_open=True)


def marked_text(text: str) -> MarkedText:
    """Mark all of a plain text."""
    return MarkedText(text=text, spans=[(0, len(text))], ends_open=True)


def _ends_open(tokenizer: ChatTokenizer, text: str, spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether a marked turn is last and the template writes no special token behind it, like
    templates whose turns end where the next begins."""
    if not spans or text[spans[-1][1] :].strip():
        return False
    return not text.rstrip().endswith(tuple(tokenizer.special_texts))


def _span_of(
    tokenizer: ChatTokenizer,
    turns: Sequence[Turn],
    place: int,
    *,
    text: str,
    tools: Sequence[Mapping[str, Any]] | None,
) -> tuple[int, int]:
    """Return (start, end) of turn `place` in the whole chat's `text`. The turn begins where the
    opening of an answer to the turns before ends, and ends where a rendering that stops after it
    ends. Some templates write a turn differently when others follow (without its reasoning, with
    another end): for these, a stand-in takes the turn's place."""
    start = end = None
    with_turn = text
    if place + 1 < len(turns):
        with_turn = tokenizer.render(turns[: place + 1], tools=tools, opens_answer=False)
    if text.startswith(with_turn):
        end = len(with_turn)
    opening = tokenizer.render(turns[:place], tools=tools) if place else None
    if opening is not None and text.startswith(opening):
        start = len(opening)
    if start is None or end is None:
        around = _around(tokenizer, turns, place, text=text, tools=tools) or (None, None)
        start = around[0] if start is None else start
        end = around[1] if end is None else end
    if start is None and opening is not None:
        start = _parting(tokenizer, turns[:place], opening, text=text, tools=tools)
    if start is None or end is None:
        raise ValueError(
            f"the chat template does not tell where turn {place + 1} begins and ends: mark it "
            "there by {% generation %} and {% endgeneration %}"
        )
    return start, end


def _parting(
    tokenizer: ChatTokenizer,
    before: Sequence[Turn],
    opening: str,
    *,
    text: str,
    tools: Sequence[Mapping[str, Any]] | None,
) -> int | None:
    """Return where the chat departs from the `opening` of an answer, within that opening. Needed
    for templates whose opening states that there is no reasoning, and turns that have some."""
    closed = tokenizer.render(before, tools=tools, opens_answer=False)
    pairs = enumerate(zip(text, opening, strict=False))
    shared = next((place for place, (one, other) in pairs if one != other), None)
    return shared if shared and text.startswith(closed) and shared > len(closed) else None


def _around(
    tokenizer: ChatTokenizer,
    turns: Sequence[Turn],
    place: int,
    *,
    text: str,
    tools: Sequence[Mapping[str, Any]] | None,
) -> tuple[int, int] | None:
    """Return (start, end) of turn `place`, found by what stands around a stand-in in its place."""
    plain = {key: value for key, value in turns[place].items() if key not in _TEXT_OF_TURN}
    probe = [*turns[:place], {**plain, "content": STAND_IN}, *turns[place + 1 :]]
    whole = tokenizer.render(probe, tools=tools, opens_answer=False)
    before, found, after = whole.partition(STAND_IN)
    if not found or not text.startswith(before) or not text.endswith(after):
        return None
    if place + 1 == len(turns):
        return len(before), len(text)
    # a rendering that stops after the turn ends it in the same way; or, for families that end a
    # last turn otherwise, the first special token does
    alone = tokenizer.render(probe[: place + 1], tools=tools, opens_answer=False)
    closing = alone.rpartition(STAND_IN)[2]
    if after.startswith(closing):
        return len(before), len(text) - len(after) + len(closing)
    ends = [(after.index(token), len(token)) for token in tokenizer.special_texts if token in after]
    if not ends:
        return None
    return len(before), len(text) - len(after) + sum(min(ends))


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans that do not overlap: turns that follow each other may touch."""
    kept: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if kept and start < kept[-1][1]:
            start = kept[-1][1]
        if start < end:
            kept.append((start, end))
    return kept


def tokenized(tokenizer: ChatTokenizer, texts: Sequence[MarkedText]) -> list[Trajectory]:
    """Return [texts] trajectories. Tokens that begin in a span are on the loss mask, except for the
    first token of all."""
    if not texts:
        return []
    encoded = tokenizer.inner(
        [text.text for text in texts], add_special_tokens=False, return_offsets_mapping=True
    )
    return [
        _trajectory(
            [*prefix, *tokenizer.require_embedded(ids)],
            [(0, 0)] * len(prefix) + offsets,
            text,
            eos_id=tokenizer.eos_id,
        )
        for ids, offsets, text in zip(
            encoded["input_ids"], encoded["offset_mapping"], texts, strict=True
        )
        for prefix in [tokenizer.missing_prefix(ids)]
    ]


def demonstrated(prompt: Prompt, tokenizer: ChatTokenizer) -> Trajectory:
    """Return a prompt with its worked response, which is on the loss mask: what the assistant
    writes there, not what tools return. Raises ValueError as `marked_chat`."""
    worked = prompt.demonstration
    assert worked is not None, f"prompt {prompt.index} has no demonstration"
    if isinstance(worked, str):
        return demonstration(prompt.token_ids, tokenizer.encode_response(worked))
    turns, first = [*prompt.messages, *worked], len(prompt.messages)
    return tokenized(tokenizer, [marked_chat(tokenizer, turns, first=first, tools=prompt.tools)])[0]


def _trajectory(
    ids: list[int], offsets: Sequence[tuple[int, int]], text: MarkedText, *, eos_id: int
) -> Trajectory:
    mask = bytearray(len(ids))
    waiting = iter(text.spans)
    span = next(waiting, None)
    for place, (start, end) in enumerate(offsets):
        while span is not None and start >= span[1]:
            span = next(waiting, None)
        if span is None:
            break
        # a token that begins before the span and ends in it is not the assistant's alone
        mask[place] = place > 0 and span[0] <= start and end > start
    if text.ends_open:
        ids, mask = [*ids, eos_id], mask + b"\1"
    return unsampled(ids, bytes(mask))


def unsampled(token_ids: Sequence[int], loss_mask: bytes) -> Trajectory:
    """Make a trajectory that no engine sampled, without log-probs. `loss_mask`: [num_tokens] 1 for
    tokens that are learned."""
    return Trajectory(
        token_ids=array("i", token_ids),
        loss_mask=loss_mask,
        logprobs=array("f", bytes(4 * len(token_ids))),
        version_spans=[],
    )


def demonstration(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Trajectory:
    """Make a trajectory whose response is on the loss mask, every token of it."""
    mask = bytes(len(prompt_ids)) + b"\1" * len(response_ids)
    return unsampled([*prompt_ids, *response_ids], mask)


def cut(trajectory: Trajectory, num_tokens: int) -> Trajectory:
    """Return the first `num_tokens` tokens."""
    if trajectory.num_tokens <= num_tokens:
        return trajectory
    return unsampled(trajectory.token_ids[:num_tokens], trajectory.loss_mask[:num_tokens])


def up_to_last(trajectory: Trajectory, token_id: int) -> Trajectory:
    """Return the trajectory without the few tokens behind the last `token_id`, if that token is
    learned."""
    ids = trajectory.token_ids
    for place in range(len(ids) - 1, max(len(ids) - 1 - _TAIL, 0), -1):
        if ids[place] == token_id and trajectory.loss_mask[place]:
            return cut(trajectory, place + 1)
    return trajectory
