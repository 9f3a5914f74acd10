"""Tokenises chats for training, as trajectories that no engine sampled: the text of the chat
template, and the mask of what the assistant would have generated. It hard-codes no special token of
a model family: `turn_places` finds where a template writes each part."""

from __future__ import annotations

import contextlib
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from milescli.core.types import Image, Prompt, Trajectory
from milescli.data.images import PromptImages, as_parts
from milescli.data.tokenizer import ChatTokenizer
from milescli.data.turn_places import (
    CALLS,
    CONTENT,
    REASONING,
    ChatRenderings,
    Piece,
    PlacedPieces,
    Turn,
    UnknownPlacesError,
)

Span = tuple[int, int]
"""[start, end) in characters."""
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedText:
    """Holds a text, and the spans of it that are trained on."""

    text: str
    spans: list[Span]
    """Ascending, without overlap."""
    ends_open: bool = False
    """True if no token in the text ends it: an end token is added, and trained on."""
    end_id: int | None = None
    """The token to add; None: the one that ends a response."""


def mark_chat(
    tokenizer: ChatTokenizer,
    turns: Sequence[Turn],
    *,
    first: int = 0,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[MarkedText]:
    """Render a chat and mark what the assistant generates from turn `first` on: from the first
    character after the generation prompt to the end of the turn. Return several texts if the
    template renders a turn, or what comes before it, differently once the chat continues; each turn
    is trained on in one of them, after the prompt from which rollout samples it. Raises ValueError
    if the template leaves out a part of a trained turn, or of a turn that it answers; if it does
    not show where a turn begins and ends; and if a trained text contains a token at which engines
    stop."""
    require_no_stop(tokenizer, turns, first=first)
    chat = _Chat(tokenizer, turns, tools)
    try:
        return _mark_sequences(chat, first)
    except UnknownPlacesError:
        if not chat.has_tags:
            raise
    whole = chat.renderings.text(len(turns), opens_answer=False)
    start = len(chat.renderings.prompt(first) or "")
    tags = chat.renderings.tags(len(turns), opens_answer=False)
    return [MarkedText(text=whole, spans=[span for span in tags if span[1] > start])]


def _mark_sequences(chat: _Chat, first: int) -> list[MarkedText]:
    turns = chat.turns
    wanted = [at for at in range(first, len(turns)) if turns[at]["role"] == "assistant"]
    made: list[_Sequence] = []
    for place in reversed(wanted):
        prompt = chat.renderings.prompt(place)
        if any(chat.mark_turn(sequence, place, prompt) for sequence in made):
            continue
        own = chat.sequence_ending_at(place, prompt)
        if not any(sequence.merge_prefix(own) for sequence in made):
            made.append(own)
    return [sequence.to_marked_text() for sequence in reversed(made)]


def mark_chat_as_one(
    tokenizer: ChatTokenizer,
    turns: Sequence[Turn],
    *,
    first: int = 0,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> MarkedText:
    """Return the text of `mark_chat`, if it is a single one. Raises ValueError as `mark_chat`, and
    if there are several texts."""
    texts = mark_chat(tokenizer, turns, first=first, tools=tools)
    if len(texts) == 1:
        return texts[0]
    if not texts:
        return MarkedText(text=tokenizer.render(turns, tools=tools, opens_answer=False), spans=[])
    raise ValueError(
        "the chat template renders earlier turns differently when the chat continues, so the "
        f"answers of this chat need {len(texts)} sequences, but only one is allowed here: keep "
        "only the turns up to its first answer"
    )


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """Holds a text that is being marked."""

    placed: PlacedPieces
    tags: list[Span] | None
    """Spans that the template itself marks; None if it marks nothing."""
    spans: list[Span] = field(default_factory=list)
    end: int = 0
    """End of the last trained turn."""
    end_id: int | None = None
    ends_open: bool = False

    def merge_prefix(self, other: _Sequence) -> bool:
        """Add the spans of `other` and return True, if the text of `other` is a prefix of this one;
        else return False."""
        if other.ends_open or not self.placed.text.startswith(other.placed.text[: other.end]):
            return False
        self.spans += other.spans
        return True

    def to_marked_text(self) -> MarkedText:
        """Return the text up to the end of the last turn, with its trained spans."""
        ascending = [*sorted(self.spans), (self.end, self.end)]
        spans = [(start, min(end, after)) for (start, end), (after, _) in pairwise(ascending)]
        if self.tags is not None:
            spans = _intersection(spans, self.tags)
        return MarkedText(
            text=self.placed.text[: self.end],
            spans=spans,
            ends_open=self.ends_open,
            end_id=self.end_id,
        )


class _Chat:
    """Finds the sequences of one chat."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        turns: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        self.tokenizer, self.turns, self.tools = tokenizer, turns, tools
        self.renderings = ChatRenderings(tokenizer, turns, tools=tools)
        self.has_tags = bool(_GENERATION_TAG.search(tokenizer.template or ""))

    def mark_turn(self, sequence: _Sequence, place: int, prompt: str | None) -> bool:
        """Mark turn `place` in a sequence that continues after it, and return True, if the sequence
        renders the turn as rollout would see and generate it; else return False."""
        text = sequence.placed.text
        if prompt is None or not text.startswith(prompt) or sequence.placed.missing_parts(place):
            return False
        sequence.spans += self._spans(sequence.placed, place, len(prompt))[0]
        return True

    def sequence_ending_at(self, place: int, prompt: str | None) -> _Sequence:
        """Return a new sequence whose last turn is `place`, with that turn marked."""
        whole = self.renderings.placed(place + 1, opens_answer=False)
        self._require_all(whole, place)
        start, moved = self._start(whole, place, prompt), 0
        tags = self.renderings.tags(place + 1, opens_answer=False) if self.has_tags else None
        if isinstance(start, _JoinedTurn):
            whole, moved, start = start.placed, start.moved, start.start
            if tags is not None:
                shifted = [(max(left + moved, start), right + moved) for left, right in tags]
                tags = self.renderings.tags(place, opens_answer=True)
                tags += [tag for tag in shifted if tag[1] > start]
        made = _Sequence(placed=whole, tags=tags)
        made.spans, made.end = self._spans(whole, place, start)
        last = whole.text[start : made.end].rstrip()
        if not last.endswith(tuple(self.tokenizer.stop_texts)):
            header = self.tokenizer.turn_end_token(self.renderings.next_header(place))
            stops = header is not None and header in self.tokenizer.stop_ids
            if stops or not last.endswith(tuple(self.tokenizer.turn_texts)):
                made.ends_open, made.end_id = True, header
        return made

    def _require_all(self, whole: PlacedPieces, place: int) -> None:
        """Raise ValueError if the template leaves out a part of turn `place`, or what is said to
        the assistant before it."""
        if lost := whole.missing_parts(place):
            raise ValueError(_omission_text(lost, place, self.tokenizer.template or ""))
        for turn in range(place):
            if self.turns[turn]["role"] != "assistant" and whole.missing_parts(turn):
                raise ValueError(
                    f"the chat template omits turn {turn + 1} ({self.turns[turn]['role']}): the "
                    "model would learn an answer to something that it never reads"
                )

    def _start(self, whole: PlacedPieces, place: int, prompt: str | None) -> int | _JoinedTurn:
        """Return the character at which turn `place`, the last of `whole`, begins: the end of its
        prompt. If the text does not begin with the prompt, it is where the two diverge within the
        opening of the answer; if they diverge earlier, return the prompt and the turn joined."""
        text = whole.text
        if prompt is None:
            opening = self.renderings.opening()
            first = next((whole.order[at][0] for at in whole.of(place)), len(text))
            found = text.rfind(opening, 0, first) if opening else -1
            return found + len(opening) if found >= 0 else first
        if text.startswith(prompt):
            return len(prompt)
        given = [piece for piece in whole.order if piece[2].turn < place]
        anchor = max((end for _, end, _ in given), default=0)
        if prompt.startswith(text[:anchor]):
            return anchor + self._common_prefix_length(text[anchor:], prompt[anchor:])
        before = self.renderings.placed(place, opens_answer=True)
        common = next((key for *_, key in reversed(given) if key in before.places), None)
        if common is None:
            raise UnknownPlacesError
        return self._join(before, whole, common)

    def _join(self, before: PlacedPieces, whole: PlacedPieces, common: Piece) -> _JoinedTurn:
        """Join the prompt `before` and the turn at the end of `whole`. Both contain the piece
        `common` before the opening of the answer."""
        left, right = before.places[common][1], whole.places[common][1]
        opening = self._common_prefix_length(whole.text[right:], before.text[left:])
        cut, start = right + opening, left + opening
        moved = start - cut
        places = {key: at for key, at in before.places.items() if at[1] <= start}
        places |= {
            key: (at[0] + moved, at[1] + moved) for key, at in whole.places.items() if at[0] >= cut
        }
        text = before.text[:start] + whole.text[cut:]
        placed = PlacedPieces(text=text, texts=whole.texts, places=places)
        return _JoinedTurn(placed=placed, moved=moved, start=start)

    def _common_prefix_length(self, text: str, opening: str) -> int:
        """Return the length of the common prefix of both texts, in characters, rounded down to
        whole tokens."""
        pairs = enumerate(zip(text, opening, strict=False))
        shared = next(
            (at for at, (one, other) in pairs if one != other), min(len(text), len(opening))
        )
        if shared == len(opening):
            return shared
        while True:
            starts = [self._token_start(each, shared) for each in (text, opening)]
            if min(starts) == shared:
                return shared
            shared = min(starts)

    def _token_start(self, text: str, place: int) -> int:
        """Return the first character of the token that contains character `place`."""
        offsets = self.tokenizer.inner(
            text[: place + _MAX_TOKEN_CHARS], add_special_tokens=False, return_offsets_mapping=True
        )["offset_mapping"]
        return max((start for start, _ in offsets if start <= place), default=0)

    def _spans(self, whole: PlacedPieces, place: int, start: int) -> tuple[list[Span], int]:
        """Return the trained spans of turn `place` from `start` on, and the end of the turn. Leaves
        out results of tools, which some templates write within a turn."""
        spans: list[Span] = []
        for number in whole.of(place, start=start):
            left, right, key = whole.order[number]
            before = whole.order[number - 1 : number] if spans else []
            begins = left if spans else start
            if before and before[0][2].turn == place:
                begins = spans.pop()[0]
            following = whole.order[number + 1 : number + 2]
            if following and following[0][2].turn == place:
                spans.append((begins, right))
            else:
                spans.append((begins, self._end(whole, place, right, key)))
        if not spans:
            spans.append((start, self._end(whole, place, start, None)))
        return spans, spans[-1][1]

    def _end(self, whole: PlacedPieces, place: int, start: int, last: Piece | None) -> int:
        """Return the end of turn `place`: after the token at which generation stops. `last`: its
        last piece, which ends at `start`."""
        number = bisect_left(whole.order, start, key=lambda piece: piece[0])
        until, _, follows = whole.order[number] if number < len(whole.order) else _NO_PIECE
        ending = whole.text[start:until]
        if found := _first_token_span(ending, self.tokenizer.stop_texts):
            return start + found[1]
        closing = ending
        if follows is not None and last is not None:
            alone = self.renderings.placed(place + 1, opens_answer=False)
            closing = alone.text[alone.places[last][1] :] if last in alone.places else ""
            closing = ending[: self._common_prefix_length(ending, closing)]
        special = self.tokenizer.turn_texts
        if ends := [closing.rfind(one) + len(one) for one in special if one in closing]:
            return start + max(ends)
        answers = follows is None or self.turns[follows.turn]["role"] == "assistant"
        if not answers and (end := self.tokenizer.turn_end_token(ending)) is not None:
            token = str(self.tokenizer.inner.convert_ids_to_tokens(end))
            return start + ending.index(token) + len(token)
        return start + len(closing.rstrip())


_NO_PIECE = (None, None, None)
_MAX_TOKEN_CHARS = 64
"""Most characters after a position that may belong to its token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _JoinedTurn:
    """Holds the prompt of a turn joined with the turn as another rendering has it."""

    placed: PlacedPieces
    moved: int
    """Offset of the turn relative to that rendering, in characters."""
    start: int


def _first_token_span(text: str, tokens: Sequence[str]) -> Span | None:
    """Return the span of the first occurrence of any of the tokens in the text, the longest if
    several begin there; None if there is none."""
    found = [(text.index(token), -len(token)) for token in tokens if token in text]
    return (min(found)[0], min(found)[0] - min(found)[1]) if found else None


def _omission_text(parts: set[str], place: int, template: str) -> str:
    """Return the sentence that says which parts of a turn a template omits."""
    reasons = [part for part in REASONING if part in parts]
    named = ", ".join(f"`{part}`" for part in sorted(parts))
    known = [name for name in REASONING if re.search(rf"[.'\"]{name}\b", template)]
    hint = ""
    if CALLS in parts:
        hint = (
            ": it does not support these tool calls; set data.chat_template to a template that does"
        )
    elif reasons and known and not set(known) & parts:
        hint = f": it reads reasoning as `{known[0]}`"
    return f"the chat template omits {named} of turn {place + 1}, or a part of it{hint}"


def require_no_stop(tokenizer: ChatTokenizer, turns: Sequence[Turn], *, first: int = 0) -> None:
    """Raise ValueError if the assistant's text from turn `first` on contains a token at which
    engines stop: the model would learn to stop there, and the text after it could never be
    generated."""
    for place, turn in enumerate(turns[first:], first):
        if turn["role"] != "assistant":
            continue
        texts = "\0".join(_strings([turn.get(part) for part in (*REASONING, CONTENT, CALLS)]))
        if found := _first_token_span(texts, tokenizer.stop_texts):
            raise ValueError(
                f"the text of turn {place + 1} (assistant) contains `{texts[slice(*found)]}`, "
                "which stops generation: remove it, because the chat template ends the turn"
            )


def _strings(value: Any) -> Iterator[str]:
    """Yield all texts in a content or in tool calls, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value.keys(), *value.values()])
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def mark_response(prompt: str, response: str) -> MarkedText:
    """Append a response to a prompt, for models without a chat template, and mark the response."""
    text = prompt + response
    return MarkedText(text=text, spans=[(len(prompt), len(text))], ends_open=True)


def mark_text(text: str) -> MarkedText:
    """Return a plain text with all of it marked."""
    return MarkedText(text=text, spans=[(0, len(text))], ends_open=True)


def _intersection(spans: Sequence[Span], tags: Sequence[Span]) -> list[Span]:
    """Return the intersection of two lists of spans, ascending; adjacent tags are merged."""
    merged: list[Span] = []
    for left, right in sorted(tags):
        if merged and left <= merged[-1][1]:
            left, before = merged.pop()
            right = max(right, before)
        merged.append((left, right))
    common: list[Span] = []
    at = 0
    for start, end in spans:
        while at < len(merged) and merged[at][1] <= start:
            at += 1
        while at < len(merged) and merged[at][0] < end:
            common.append((max(start, merged[at][0]), min(end, merged[at][1])))
            if merged[at][1] > end:
                break
            at += 1
    return common


def tokenize_marked(tokenizer: ChatTokenizer, texts: Sequence[MarkedText]) -> list[Trajectory]:
    """Return one trajectory per text. Tokens in a span are on the loss mask, except for the very
    first token. The text before a span is tokenised separately if a token would cross the span's
    start, because engines tokenise a prompt before they generate."""
    if not texts:
        return []
    encoded = tokenizer.inner(
        [text.text for text in texts], add_special_tokens=False, return_offsets_mapping=True
    )
    made = []
    for text, ids, offsets in zip(
        texts, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        ids, offsets = _split_at_spans(tokenizer, text, ids, offsets)
        prefix = tokenizer.missing_bos(ids)
        made.append(
            _trajectory(
                [*prefix, *tokenizer.require_embedded(ids)],
                [(0, 0)] * len(prefix) + offsets,
                text,
                eos_id=tokenizer.eos_id,
            )
        )
    return made


def _split_at_spans(
    tokenizer: ChatTokenizer, text: MarkedText, ids: list[int], offsets: list[Span]
) -> tuple[list[int], list[Span]]:
    """Return the tokens and offsets, with every token that crosses the start of a span split
    there."""
    starts = {start for start, _ in text.spans}
    inner = sorted({cut for cut in starts for a, b in _tokens_around(offsets, cut) if a < cut < b})
    if not inner:
        return ids, offsets
    cuts = [0, *inner, len(text.text)]
    pieces = [text.text[a:b] for a, b in pairwise(cuts)]
    encoded = tokenizer.inner(pieces, add_special_tokens=False, return_offsets_mapping=True)
    ids = [token for piece in encoded["input_ids"] for token in piece]
    places = zip(cuts, encoded["offset_mapping"], strict=False)
    return ids, [(a + cut, b + cut) for cut, piece in places for a, b in piece]


def _tokens_around(offsets: Sequence[Span], place: int) -> Sequence[Span]:
    """Return the offsets of the tokens that may contain character `place`."""
    at = bisect_left(offsets, place, key=lambda span: span[0])
    return offsets[max(at - 1, 0) : at]


def turn_end_ids(tokenizer: ChatTokenizer) -> set[int]:
    """Return the tokens that a trained model learns to end a turn with: an answer, and a turn that
    calls a tool if the template supports such turns."""
    call = {"name": "a", "arguments": {"a": "a"}}
    calls = [{"type": "function", "id": "call00000", "function": call}]
    ends = {tokenizer.eos_id}
    if tokenizer.template is None:
        return ends
    for more in ({"content": "a"}, {"content": "", CALLS: calls}):
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", **more}]
        with contextlib.suppress(Exception):  # a template may raise anything
            ends |= {
                int(line.token_ids[-1])
                for line in tokenize_marked(tokenizer, mark_chat(tokenizer, turns))
            }
    return ends


def demonstration_trajectories(prompt: Prompt, tokenizer: ChatTokenizer) -> list[Trajectory]:
    """Return a prompt with its worked response as trajectories: what the assistant says is on the
    loss mask, what tools return is not. There are several if `mark_chat` returns several. Raises
    ValueError as `mark_chat`."""
    worked = prompt.demonstration
    assert worked is not None, f"prompt {prompt.index} has no demonstration"
    if isinstance(worked, str):
        require_no_stop(tokenizer, [{"role": "assistant", CONTENT: worked}])
        made = demonstration_trajectory(prompt.token_ids, tokenizer.encode_response(worked))
        return [replace(made, image_spans=prompt.image_spans, images=prompt.images)]
    images = [*prompt.images, *prompt.worked_images]
    question = as_parts(prompt.messages) if prompt.images else prompt.messages
    worked = as_parts(worked) if prompt.worked_images else worked
    texts = mark_chat(tokenizer, [*question, *worked], first=len(question), tools=prompt.tools)
    lines = tokenize_marked(tokenizer, texts)
    if not images or tokenizer.images is None:
        return lines
    return [with_image_tokens(line, images, tokenizer.images) for line in lines]


def with_image_tokens(
    trajectory: Trajectory, images: Sequence[Image], image_encoder: PromptImages
) -> Trajectory:
    """Return a trajectory that no engine sampled, with each image token replaced by all tokens of
    its image. If the trajectory is only the beginning of a chat, it uses the first of `images`.
    Raises ValueError if there are more image tokens than images."""
    num_shown = sum(token == image_encoder.token_id for token in trajectory.token_ids)
    ids, spans, places = image_encoder.expanded(trajectory.token_ids, images[:num_shown])
    made = unsampled_trajectory(ids, bytes(trajectory.loss_mask[place] for place in places))
    return replace(made, image_spans=spans, images=images[:num_shown])


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
        mask[place] = place > 0 and span[0] <= start and end > start
    if text.ends_open:
        end = eos_id if text.end_id is None else text.end_id
        ids, mask = [*ids, end], mask + b"\1"
    return unsampled_trajectory(ids, bytes(mask))


def unsampled_trajectory(token_ids: Sequence[int], loss_mask: bytes) -> Trajectory:
    """Make a trajectory, without log-probs, of tokens that no engine sampled. `loss_mask`:
    [num_tokens] 1 for tokens that are trained on."""
    return Trajectory(
        token_ids=array("i", token_ids),
        loss_mask=loss_mask,
        logprobs=array("f", bytes(4 * len(token_ids))),
        version_spans=[],
    )


def demonstration_trajectory(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Trajectory:
    """Make a trajectory of a prompt and a response, with every token of the response on the loss
    mask."""
    mask = bytes(len(prompt_ids)) + b"\1" * len(response_ids)
    return unsampled_trajectory([*prompt_ids, *response_ids], mask)


def truncated(trajectory: Trajectory, num_tokens: int) -> Trajectory:
    """Return the trajectory's first `num_tokens` tokens."""
    if trajectory.num_tokens <= num_tokens:
        return trajectory
    whole = tuple(
        span for span in trajectory.image_spans if span.start + span.num_tokens <= num_tokens
    )
    if len(whole) < len(trajectory.image_spans):  # nothing is seen of a part of an image
        num_tokens = min(num_tokens, trajectory.image_spans[len(whole)].start)
    made = unsampled_trajectory(
        trajectory.token_ids[:num_tokens], trajectory.loss_mask[:num_tokens]
    )
    return replace(made, image_spans=whole, images=trajectory.images)
