"""The algorithms as a table, one of them in full, or either as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from milescli.console.output import Output

if TYPE_CHECKING:
    from milescli.listings.algorithms import AlgorithmRow, Learned
    from milescli.recipe.algorithms import Setting


def show_algorithms(rows: Sequence[AlgorithmRow], *, output: Output) -> None:
    """One line an algorithm."""
    output.json("algorithms", {"algorithms": [asdict(row) for row in rows]})
    output.table(
        ["algorithm", "what it is", "differs from", "by", "paper", "learned"],
        [
            (
                row.name,
                row.about,
                row.base or "",
                _differences(row.sets) if row.base else "sets every piece",
                row.paper.removeprefix("arXiv "),
                shown(row.learned),
            )
            for row in rows
        ],
    )
    output.note(
        "\nlearned: greedy held-out accuracy before and after the quickstart's RL steps, mean over "
        "seeds (docs/algorithms.md)"
    )
    output.note(
        "miles launch --recipe NAME --set train.algorithm=NAME   any piece can be set otherwise"
    )


def show_algorithm(row: AlgorithmRow, *, output: Output) -> None:
    """All that it sets."""
    output.json("algorithm", asdict(row))
    output.text(f"{row.name}: {row.about} ({row.paper})")
    output.blank()
    output.table(
        ["key", "value", "by"],
        [
            (key, text(value), row.name if key in row.sets else row.base or "")
            for key, value in row.settings.items()
        ],
    )
    output.note(f"learned the quickstart's task: {shown(row.learned)}")


def text(value: Setting) -> str:
    """As a recipe says it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def shown(learned: Learned | None) -> str:
    """`12 -> 98 %`."""
    if learned is None:
        return "not measured"
    before, after = (100 * sum(values) / len(values) for values in (learned.before, learned.after))
    return f"{before:.0f} -> {after:.0f} %"


def _differences(sets: Mapping[str, Setting]) -> str:
    return ", ".join(f"{key.removeprefix('train.')}={text(value)}" for key, value in sets.items())
