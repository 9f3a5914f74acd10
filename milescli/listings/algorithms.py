"""Implements `miles algorithms`: the rows of the table, what each sets, and how it learned the
quickstart's task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from milescli.core.files import read_json
from milescli.recipe.algorithms import ALGORITHMS, Setting, settings_of
from milescli.recipe.templates import templates_dir

MEASURED_FILE = "algorithms.json"
"""File next to the recipes with the results of `bench/learn.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Holds the results of runs of the quickstart's task, one per seed."""

    before: list[float]
    """Greedy accuracy on held-out prompts, of 1."""
    after: list[float]
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmRow:
    """Describes one algorithm."""

    name: str
    about: str
    paper: str
    base: str | None
    sets: Mapping[str, Setting]
    """What differs from the base."""
    settings: Mapping[str, Setting]
    """All keys that it sets."""
    learned: Learned | None
    """None: not measured."""


def algorithm_rows() -> list[AlgorithmRow]:
    """List every algorithm, in the order of the table."""
    file = templates_dir() / MEASURED_FILE
    measured = read_json(file) if file.exists() else {}
    return [
        AlgorithmRow(
            name=name,
            about=row.about,
            paper=row.paper,
            base=row.base,
            sets=row.sets,
            settings=settings_of(name),
            learned=Learned(**measured[name]) if name in measured else None,
        )
        for name, row in ALGORITHMS.items()
    ]
