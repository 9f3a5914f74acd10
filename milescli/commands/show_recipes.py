"""The list of recipes as a table, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from milescli.console.output import Output
from milescli.core.units import format_count

if TYPE_CHECKING:
    from milescli.listings.recipes import RecipeRow

UNKNOWN = "-"


def show_recipes(rows: Sequence[RecipeRow], *, output: Output) -> None:
    """One line a recipe, smaller models first."""
    output.json("recipes", {"recipes": [asdict(row) for row in rows]})
    output.table(
        ["recipe", "parameters", "fits on", "algorithm", "trains on", "what it is"],
        [
            (
                ", ".join([row.name, *row.aliases]),
                _size(row),
                row.smallest_machine or UNKNOWN,
                row.algorithm,
                row.prompts.removeprefix("hf:"),
                row.description,
            )
            for row in rows
        ],
    )
    output.note(
        "\nfits on: the smallest machine by the planner's estimate, counted in H100s; yours may do "
        "with less or more"
    )
    output.note(
        "all but the quickstarts are planned by miles and were never run on a GPU by its makers: "
        "watch their first steps"
    )
    output.note("miles launch --recipe NAME --dry-run   shows what would run here")


def _size(row: RecipeRow) -> str:
    if row.num_parameters is None:
        return UNKNOWN
    total = format_count(row.num_parameters)
    active = row.num_active_parameters
    return (
        f"{total}, {format_count(active)} active"
        if active and active != row.num_parameters
        else total
    )
