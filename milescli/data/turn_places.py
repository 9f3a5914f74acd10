"""Finds where a chat template writes each piece of a chat, and which pieces it leaves out, for any
template: it renders the chat once more with a pair of unused characters around each piece, and
trusts the result only if removing them gives the original text. `chat_masks` decides what is
trained on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from milescli.data.tokenizer import ChatTokenizer

Turn = Mapping[str, Any]
"""A message in the form of chat templates: `role`, `content`, and further keys of a family
(tool_calls, reasoning_content, name)."""
CONTENT, CALLS = "content", "tool_calls"
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a turn's reasoning in different families."""

_TAGS = re.compile(r"(<[^<>\s]*think[^<>\s]*>|\[/?THINK\])")
"""Separates the reasoning within a content from its answer: templates split there."""
_UNUSED = (0xF0000, 0x100000)
"""Beginning of planes 15 and 16 of Unicode, which no real text uses."""
_NUM_UNUSED = 0xFFF0
_EVERYTHING, _NO_ARGUMENTS, _NO_CALLS, _ASSISTANT = range(4)
"""What is marked, most first: some templates sort arguments, or read the texts of users."""


class UnknownPlacesError(ValueError):
    """Reports that a template changes the texts of a chat, so that they cannot be found."""

    def __init__(self) -> None:
        super().__init__(
            "the chat template does not tell where a turn begins and ends: mark it there by "
            "{% generation %} and {% endgeneration %}"
        )


class Piece(NamedTuple):
    """Identifies a text of the chat."""

    turn: int
    part: str
    """`content`, `tool_calls`, or one of REASONING."""
    number: int
    """Counts the pieces of the chat."""


@dataclass(frozen=True, kw_only=True)
class PlacedPieces:
    """Holds a rendered text, and the positions of the chat's pieces in it."""

    text: str
    texts: Mapping[Piece, str]
    """All pieces of the chat."""
    places: Mapping[Piece, tuple[int, int]]
    """[start, end) in characters, without pieces that are left out. A text of a role other than the
    assistant is marked by one point in its middle."""

    @cached_property
    def order(self) -> list[tuple[int, int, Piece]]:
        """Return (start, end, piece), ascending."""
        return sorted((*place, piece) for piece, place in self.places.items())

    def of(self, turn: int, *, start: int = 0) -> list[int]:
        """Return the indices in `order` of a turn's pieces that begin at `start` or later."""
        return [at for at in self._numbers.get(turn, ()) if self.order[at][0] >= start]

    @cached_property
    def _numbers(self) -> dict[int, list[int]]:
        numbers: dict[int, list[int]] = {}
        for at, (_, _, piece) in enumerate(self.order):
            numbers.setdefault(piece.turn, []).append(at)
        return numbers

    @cached_property
    def _missing(self) -> dict[int, list[Piece]]:
        missing: dict[int, list[Piece]] = {}
        for piece in self.texts.keys() - self.places.keys():
            missing.setdefault(piece.turn, []).append(piece)
        return missing

    def missing_parts(self, turn: int) -> set[str]:
        """Return the parts of a turn that are missing in the text, completely or in part. Reasoning
        that has several names must be there only once."""
        missing = self._missing.get(turn, [])
        placed = [self.order[at][2] for at in self.of(turn)] if missing else []
        shown = {self.texts[piece] for piece in placed if piece.part in REASONING}
        return {
            piece.part
            for piece in missing
            if piece.part not in REASONING or self.texts[piece] not in shown
        }


class ChatRenderings:
    """Renders prefixes of one chat."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        turns: Sequence[Turn],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        self.turns = turns
        self._render = lambda some, opens: tokenizer.render(some, tools=tools, opens_answer=opens)
        self._mark = lambda some, opens: tokenizer.render_marked(
            some, tools=tools, opens_answer=opens
        )
        self._depth = _EVERYTHING

    def text(self, num_turns: int, *, opens_answer: bool) -> str:
        """Return the first turns as the model reads them."""
        return str(self._render(self.turns[:num_turns], opens_answer))

    def tags(self, num_turns: int, *, opens_answer: bool) -> list[tuple[int, int]]:
        """Return the spans that the template itself marks in `text`."""
        return self._mark(self.turns[:num_turns], opens_answer)

    def prompt(self, turn: int) -> str | None:
        """Return the prompt from which rollout samples turn `turn`; None if the template accepts no
        empty chat."""
        try:
            return self.text(turn, opens_answer=True)
        except Exception:
            if turn:
                raise
            return None

    def opening(self) -> str:
        """Return the text that opens an answer after the turn of a user."""
        question = [{"role": "user", "content": "a"}]
        return str(self._render(question, True))[len(self._render(question, False)) :]

    def next_header(self, turn: int) -> str:
        """Return the text that the template writes after turn `turn` before the text of the next
        turn, which is a tool's (if the turn calls tools) or a user's; empty if that cannot be
        found."""
        role = "tool" if self.turns[turn].get(CALLS) else "user"
        until = self.turns[: turn + 1]
        try:
            text = str(self._render(until, False))
            more = str(self._render([*until, {"role": role, "content": _LATER}], False))
        except Exception:  # a template that wants other turns
            return ""
        return more.partition(_LATER)[0][len(text) :] if more.startswith(text) else ""

    def placed(self, num_turns: int, *, opens_answer: bool) -> PlacedPieces:
        """Return the first turns with the positions of their pieces. Raises UnknownPlacesError if
        the template does not reveal them."""
        text, turns = self.text(num_turns, opens_answer=opens_answer), self.turns[:num_turns]
        base = next((base for base in _UNUSED if not _marks_from(base).search(text)), None)
        while base is not None and self._depth <= _ASSISTANT:
            marker = _Marker(base, self._depth)
            try:
                marked = str(self._render([*marker.turns(turns)], opens_answer))
            except Exception:  # the template reads what is marked
                marked = ""
            found = marker.found(marked)
            if found is not None and found.text == text:
                return found
            self._depth += 1
        raise UnknownPlacesError


_LATER = "\u241flater\u241f"


class _Marker:
    """Surrounds the pieces of turns with unused characters, from `base` on."""

    def __init__(self, base: int, depth: int) -> None:
        self._base, self._depth = base, depth
        self._texts: dict[Piece, str] = {}

    def turns(self, turns: Sequence[Turn]) -> Iterator[dict[str, Any]]:
        """Yield copies of the turns with marks in them."""
        for number, turn in enumerate(turns):
            if turn["role"] == "assistant":
                yield self._mark_message(number, turn)
            elif self._depth < _ASSISTANT:
                yield self._mark_given_text(number, turn)
            else:
                yield dict(turn)

    def _mark_message(self, number: int, turn: Turn) -> dict[str, Any]:
        made = dict(turn)
        for part in (*REASONING, CONTENT):
            if part in made:
                made[part] = _in_texts(
                    made[part],
                    lambda text, part=part: "".join(
                        self._surround(number, part, piece) if place % 2 == 0 else piece
                        for place, piece in enumerate(_TAGS.split(text))
                    ),
                )
        if made.get(CALLS) and self._depth < _NO_CALLS:
            made[CALLS] = [self._call(number, call) for call in made[CALLS]]
        return made

    def _call(self, number: int, call: Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._call(number, call["function"])}
        made = dict(call)
        for key in ("name", "arguments") if self._depth < _NO_ARGUMENTS else ("name",):
            if key in made:
                made[key] = self._mark_values(number, made[key])
        return made

    def _mark_values(self, number: int, value: Any) -> Any:
        if isinstance(value, str):
            return self._surround(number, CALLS, value)
        if isinstance(value, Mapping):
            return {
                self._surround(number, CALLS, key): self._mark_values(number, item)
                for key, item in value.items()
            }
        return [self._mark_values(number, item) for item in value] if type(value) is list else value

    def _mark_given_text(self, number: int, turn: Turn) -> dict[str, Any]:
        def pointed(text: str) -> str:
            core = text.strip()
            middle = text.find(core) + len(core) // 2
            return text[:middle] + self._pair(number, CONTENT, core)("") + text[middle:]

        return {**turn, CONTENT: _in_texts(turn.get(CONTENT), pointed)}

    def _surround(self, number: int, part: str, text: str) -> str:
        if not (core := text.strip()):
            return text
        before, _, after = text.partition(core)
        return before + self._pair(number, part, core)(core) + after

    def _pair(self, number: int, part: str, core: str) -> Callable[[str], str]:
        if not core or 2 * len(self._texts) + 2 > _NUM_UNUSED:
            return lambda text: text
        first = self._base + 2 * len(self._texts)
        self._texts[Piece(number, part, len(self._texts))] = core
        return lambda text: f"{chr(first)}{text}{chr(first + 1)}"

    def found(self, marked: str) -> PlacedPieces | None:
        """Return the text without marks, and the positions of the pieces whose marks are all
        there."""
        starts: dict[int, int] = {}
        places: dict[Piece, tuple[int, int]] = {}
        keys, clean, last = list(self._texts), list[str](), 0
        length = 0
        for mark in _marks_from(self._base).finditer(marked):
            clean.append(marked[last : mark.start()])
            length, last = length + mark.start() - last, mark.end()
            number, closes = divmod(ord(mark[0]) - self._base, 2)
            if not closes:
                starts.setdefault(number, length)
            elif number in starts:
                places.setdefault(keys[number], (starts[number], length))
        clean.append(marked[last:])
        return PlacedPieces(text="".join(clean), texts=self._texts, places=places)


def _marks_from(base: int) -> re.Pattern[str]:
    return re.compile(f"[{chr(base)}-{chr(base + _NUM_UNUSED)}]")


def _in_texts(content: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to a content: a text, or a list of parts with texts."""
    if isinstance(content, str):
        return change(content)
    if isinstance(content, list):
        return [
            {**part, "text": change(part["text"])}
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
    return content
