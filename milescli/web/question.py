"""What a request asks: the words behind the `?` of its URL, each checked. Called by the
endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from milescli.web.refusals import BadRequest

LONGEST_TEXT = 1000
"""Characters of one value."""


@dataclass(frozen=True, slots=True)
class Question:
    """Of one request."""

    pairs: Sequence[tuple[str, str]] = field(default=())
    """Names and values, in their order."""

    def text(self, name: str) -> str:
        """The last that was given; empty where none was. Raises BadRequest where it is too long."""
        value = next((value for key, value in reversed(self.pairs) if key == name), "")
        if len(value) > LONGEST_TEXT:
            raise BadRequest(
                f"`{name}` is too long",
                why=f"it has {len(value)} characters, {LONGEST_TEXT} are allowed",
                fix=f"ask for a shorter {name}",
            )
        return value

    def texts(self, name: str) -> list[str]:
        """All that were given, each once."""
        return list(dict.fromkeys(value for key, value in self.pairs if key == name))

    def number(
        self, name: str, default: int | None = None, *, low: int = 0, high: int = 2**53
    ) -> int | None:
        """A whole number. Raises BadRequest for what is none, or not within [low, high]."""
        text = self.text(name)
        if not text:
            return default
        digits = text.removeprefix("-")
        is_number = digits.isascii() and digits.isdecimal() and len(digits) < 17
        if not is_number or not low <= int(text) <= high:
            raise BadRequest(
                f"`{name}={text[:40]}` is not what it can be",
                why=f"it is a whole number from {low} to {high}",
                fix=f"{name}={low if default is None else default}",
            )
        return int(text)

    def count(self, name: str, default: int, *, low: int = 0, high: int = 2**53) -> int:
        """The same of what always has a value."""
        number = self.number(name, default, low=low, high=high)
        assert number is not None, "it has a default"
        return number
