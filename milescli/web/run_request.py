"""Defines the argument of an endpoint: a run, a query, and the run's history. Endpoints are plain
functions in the neighbouring files: `RunRequest` in, JSON values out; each runs in a thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from milescli.checkpoint.run_dir import RunDir
from milescli.core.history import History
from milescli.web.histories import Histories
from milescli.web.responses import BadRequest
from milescli.web.shown import ShownRun

LONGEST_TEXT = 1000
"""Largest number of characters of one value."""


@dataclass(frozen=True, slots=True)
class Query:
    """Holds the query parameters of one request."""

    pairs: Sequence[tuple[str, str]] = field(default=())
    """Names and values, in their order."""

    def text(self, name: str) -> str:
        """Return the last value of a name; empty if there is none. Raises BadRequest if it is too
        long."""
        value = next((value for key, value in reversed(self.pairs) if key == name), "")
        if len(value) > LONGEST_TEXT:
            raise BadRequest(
                f"`{name}` is too long",
                why=f"it has {len(value)} characters, {LONGEST_TEXT} are allowed",
                fix=f"ask for a shorter {name}",
            )
        return value

    def texts(self, name: str) -> list[str]:
        """Return all different values of a name."""
        return list(dict.fromkeys(value for key, value in self.pairs if key == name))

    def number(
        self, name: str, default: int | None = None, *, low: int = 0, high: int = 2**53
    ) -> int | None:
        """Return a whole number. Raises BadRequest if it is none, or not within [low, high]."""
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
        """Return a whole number that always has a value."""
        number = self.number(name, default, low=low, high=high)
        assert number is not None, "it has a default"
        return number


Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Holds one request about one run."""

    shown: ShownRun
    histories: Histories
    query: Query = field(default_factory=Query)
    names: Mapping[str, str] = field(default_factory=dict)
    """Parts of the path: attempt, file."""
    nothing: History = field(default_factory=History)
    """Empty history for an adapter without events; the same object each time."""

    @property
    def run(self) -> RunDir:
        """Return the directory of the run."""
        return self.shown.run

    @property
    def with_logs(self) -> RunDir:
        """Return the directory with logs, plan and manifest: for an adapter, that of the run that
        trains it."""
        above = self.shown.parent
        return above if above is not None and not (self.run.path / "logs").is_dir() else self.run

    @contextmanager
    def history(self) -> Iterator[History]:
        """Provide the history as `Histories.reading` does. For an adapter without events of its
        own, provide its part of the history of the run that trains it."""
        above = self.shown.parent
        if above is None or self.run.events_file.exists():
            with self.histories.reading(self.run) as history:
                yield history
        else:
            with self.histories.reading(above) as history:
                yield history.adapters.get(self.run.name, self.nothing)
