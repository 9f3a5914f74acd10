"""The figures of a run's steps, one array for each name of metrics.jsonl: what charts draw and
diagnoses look at. Pure; grown by `history`."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping


class Columns:
    """Steps in ascending order, each with a figure or NaN in every column."""

    def __init__(self) -> None:
        self.steps: array[int] = array("q")
        self.times: array[float] = array("d")
        """[steps] when each was done, seconds since 1970; NaN where that is not known."""
        self._columns: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __getitem__(self, name: str) -> array[float]:
        """[steps] NaN where a step has none. Raises KeyError where no step has one."""
        return self._padded(self._columns[name])

    def get(self, name: str) -> array[float]:
        """As `[name]`, all NaN where no step has it."""
        return self[name] if name in self else array("d", [math.nan]) * len(self)

    def last(self, name: str) -> float | None:
        """The newest step's; None where it has none."""
        column = self._columns.get(name)
        is_there = column is not None and len(self) > 0 and len(column) == len(self)
        return column[-1] if is_there and not math.isnan(column[-1]) else None

    def add(self, step: int, figures: Mapping[str, float], *, time_s: float = math.nan) -> None:
        """A step's. One that was there before, and all after it, are forgotten: a resumed run does
        them again."""
        if self.steps and step <= self.steps[-1]:
            self._cut(bisect_left(self.steps, step))
        place = len(self.steps)
        self.steps.append(step)
        self.times.append(time_s)
        for name, value in figures.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = array("d")
            if len(column) < place:
                column.extend([math.nan] * (place - len(column)))
            column.append(value)

    def _cut(self, length: int) -> None:
        for values in (self.steps, self.times, *self._columns.values()):
            del values[length:]

    def _padded(self, column: array[float]) -> array[float]:
        if missing := len(self) - len(column):
            column.extend([math.nan] * missing)
        return column
