"""The figures of a run's steps, one array for each name of metrics.jsonl: what charts draw and
diagnoses look at. Pure; grown by `history`."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any

_SECTIONS = {
    "rollout": "rollout",
    "seconds": "time",
    "publish": "publish",
    "flow": "flow",
}
"""Part of a StepDone -> the first part of its figures' names."""
_NOT_FIGURES = ("reward_parts", "figures", "reward_histogram")
_SPEEDS = ("rollout_tokens_per_s", "train_tokens_per_s")
_ROW_SECONDS = ("pack_s", "train_s", "save_s", "step_s")

Record = Mapping[str, Any]
"""An event as events.jsonl holds it: its class under `event`, when under `time`."""


def step_figures(record: Record) -> dict[str, float]:
    """name -> value of a StepDone or RowStepDone, by the names of metrics.jsonl. What is no number
    is left out."""
    report = record["report"]
    told = {f"train/{name}": value for name, value in report.items() if name != "figures"}
    told |= {f"train/{name}": value for name, value in report.get("figures", {}).items()}
    if record["event"] == "RowStepDone":
        # nobody sampled these tokens, so that nobody can differ about them
        told = {name: value for name, value in told.items() if "logprob" not in name}
        told |= {f"time/{name}": record[name] for name in _ROW_SECONDS}
        told["train/epoch"] = record["epoch"]
        told["speed/train_tokens_per_s"] = record["tokens_per_s"]
    else:
        for part, word in _SECTIONS.items():
            for name, value in record.get(part, {}).items():
                if name not in _NOT_FIGURES:
                    told[f"{word}/{name}"] = value
        rollout = record["rollout"]
        told |= {f"reward/{name}": value for name, value in rollout["reward_parts"].items()}
        told |= {f"agent/{name}": value for name, value in rollout.get("figures", {}).items()}
        told |= {f"speed/{name}": record[name] for name in _SPEEDS}
        told["weights/version"] = record["version"]
    return {name: value for name, value in told.items() if isinstance(value, int | float)}


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
