"""Streams a chat response in pieces while it is sampled: those that certainly belong to its
reasoning or its content. The rest comes with the reply, which parses the whole response."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from milescli.core.errors import MilesError
from milescli.rollout.base import Parsed

OnPiece = Callable[[str, str], None]
"""Called with `reasoning_content` or `content`, and the next piece of its text."""
LONGEST_MARKER = 64
"""Upper bound on the characters of a model family's markers (`<tool_call>`, `</think>`, ...)."""
_OPENINGS = "<[{"
"""Each marker begins with one of these, some of them after a word."""
_LAST_WORD = re.compile(r"\s*\w{0,16}\Z", re.ASCII)


@dataclass(slots=True, kw_only=True)
class TextPieces:
    """Streams the text of one response piece by piece. Belongs to one event loop."""

    emit: OnPiece
    decode: Callable[[Sequence[int]], str]
    """Token ids -> text; with special tokens where there is a parser."""
    parse: Callable[[str], Awaitable[Parsed]] | None
    """Parses a text that may be cut anywhere; None: all of it is content."""
    has_tools: bool
    stop: Sequence[str] = ()
    """Strings before which the text ends."""
    _text: str = ""
    _taken: Sequence[int] = field(default_factory=list)
    """Tokens whose text is in `_text`."""
    _start: int = 0
    """Tokens from here on were taken last: a character, or the space before a word, may depend on
    tokens before it."""
    _emitted: dict[str, str] = field(default_factory=dict)
    _parsing: asyncio.Task[None] | None = None

    def add(self, token_ids: Sequence[int]) -> None:
        """Take all tokens of the response so far. After a pause, or a lost engine, the last ones
        before it may be missing or others."""
        if token_ids[: len(self._taken)] != self._taken:
            self._text, self._start, self._taken = "", 0, []
        if len(token_ids) <= len(self._taken):
            return
        known = self.decode(self._taken[self._start :])
        text = self.decode(token_ids[self._start :])
        if len(text) <= len(known) or text.endswith("\ufffd"):
            return  # a character is not whole
        self._text += text[len(known) :]
        self._start, self._taken = len(self._taken), token_ids
        if self.parse is None:
            self._emit("content", self._text_so_far)
        elif self._parsing is None or self._parsing.done():
            self._parsing = asyncio.ensure_future(self._parse_all())

    async def end(self) -> None:
        """Wait for the last piece; no piece comes after that."""
        if self._parsing is not None:
            with suppress(MilesError):  # the reply's own parsing says it
                await self._parsing

    @property
    def _text_so_far(self) -> str:
        """Return the text, without an end that may be the beginning of a stop string."""
        text = before_stop(self._text, self.stop)
        return text if len(text) < len(self._text) else _without_begun(text, self.stop)

    async def _parse_all(self) -> None:
        assert self.parse is not None
        seen = ""
        while len(text := self._text_so_far) > len(seen):
            seen = text
            parsed = await self.parse(text)
            for part, piece in sure_parts(parsed, has_tools=self.has_tools):
                self._emit(part, piece)

    def _emit(self, part: str, text: str) -> None:
        told = self._emitted.get(part, "")
        if len(text) > len(told) and text.startswith(told):
            self._emitted[part] = text
            self.emit(part, text[len(told) :])


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    return text[: min((at for one in stop if (at := text.find(one)) >= 0), default=len(text))]


def _without_begun(text: str, stop: Sequence[str]) -> str:
    """Return the text without the longest end with which a stop string begins."""
    longest = max(map(len, stop), default=1) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if any(one.startswith(text[start:]) for one in stop):
            return text[:start]
    return text


def num_begun(
    token_ids: Sequence[int], *, stop: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> int:
    """Return how many of the last tokens may be the beginning of a stop string, or of one of its
    characters."""
    last = token_ids[-max(len(one.encode()) for one in stop) :]
    sure = _without_begun(decode(last).rstrip("\ufffd"), stop)
    count = 0
    while len(decode(last[: len(last) - count])) > len(sure):
        count += 1
    return count


def sure_parts(parsed: Parsed, *, has_tools: bool) -> Iterator[tuple[str, str]]:
    """Yield the parts of an incomplete response up to where later tokens cannot change them.
    `has_tools`: everything from the first opening bracket on may become a call, and blanks before
    the content are dropped, as parsers drop them only before a call."""
    reasoning = parsed.reasoning or ""
    content = parsed.content.lstrip() if has_tools else parsed.content
    yield "reasoning_content", reasoning if content.strip() else _sure(reasoning, LONGEST_MARKER)
    if not parsed.calls and parsed.malformed is None:
        yield "content", _sure(content, len(content) if has_tools else LONGEST_MARKER)


def _sure(text: str, size: int) -> str:
    """Return the beginning of a text whose last `size` characters may contain the start of a
    marker."""
    first = max(0, len(text) - size)
    opening = min((at for sign in _OPENINGS if (at := text.find(sign, first)) >= 0), default=None)
    return _LAST_WORD.sub("", text[:opening])
