"""Stores the prompts of a session, most of which continue an earlier one, so that memory grows with
the length of its conversations and not with the square of their turns."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar, overload

from milescli.rollout.base import Turn

Items = TypeVar("Items", "array[int]", bytearray)
"""Token ids, or the bytes of a text."""


@dataclass(frozen=True, slots=True)
class Prefix(Generic[Items]):
    """Holds the first `size` items of a line that other prefixes share."""

    _line: Items
    size: int

    def __len__(self) -> int:
        return self.size

    @property
    def items(self) -> Items:
        """Return a copy of the items."""
        return self._line[: self.size]


@dataclass(slots=True)
class SharedPrefixes(Generic[Items]):
    """Stores sequences so that those of which one continues the other share their items."""

    _lines: list[Items] = field(default_factory=list)

    def add(self, items: Items) -> Prefix[Items]:
        """Store a sequence, which the caller must not change afterwards."""
        for line in reversed(self._lines):
            common = min(len(line), len(items))
            if common and line[common - 1] != items[common - 1]:
                continue  # most branches differ there, and need not be compared whole
            if line[:common] == items[:common]:
                line.extend(items[common:])
                return Prefix(line, len(items))
        self._lines.append(items)
        return Prefix(items, len(items))


class SharedTexts:
    """Stores texts as SharedPrefixes does."""

    def __init__(self) -> None:
        self._stored: SharedPrefixes[bytearray] = SharedPrefixes()

    def add(self, text: str) -> Prefix[bytearray]:
        """Store a text."""
        return self._stored.add(bytearray(text, "utf-8", "surrogatepass"))


def text_of_prefix(stored: Prefix[bytearray]) -> str:
    """Return a text of SharedTexts."""
    return stored.items.decode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class _StoredTurn:
    """Holds a turn without its prompt, and the prompt."""

    rest: Turn
    prompt: Prefix[array[int]]
    whole: weakref.ref[Turn]
    """The turn itself, while its agent keeps it."""


class Turns(Sequence[Turn]):
    """Stores the turns of a session. An access returns the same Turn as long as somebody keeps it,
    and else makes an equal one."""

    def __init__(self) -> None:
        self._stored: list[_StoredTurn] = []
        self._prompts: SharedPrefixes[array[int]] = SharedPrefixes()

    def append(self, turn: Turn) -> None:
        """Add a turn."""
        prompt = self._prompts.add(array("i", turn.prompt_ids))
        rest = replace(turn, prompt_ids=())
        self._stored.append(_StoredTurn(rest, prompt, weakref.ref(turn)))

    def responses(self) -> list[list[int]]:
        """Return [num_turns][num_response_tokens] the sampled tokens."""
        return [stored.rest.response_ids for stored in self._stored]

    def __len__(self) -> int:
        return len(self._stored)

    @overload
    def __getitem__(self, place: int) -> Turn: ...
    @overload
    def __getitem__(self, place: slice) -> list[Turn]: ...
    def __getitem__(self, place: int | slice) -> Turn | list[Turn]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        stored = self._stored[place]
        return stored.whole() or replace(stored.rest, prompt_ids=stored.prompt.items.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __reduce__(self) -> tuple[type[list], tuple[list[Turn]]]:
        return list, (list(self),)

    def __repr__(self) -> str:
        return repr(list(self))
