"""Validation rules as rows: what a recipe may not combine, and the error that says so. Each
section's module yields its own rows; `check` takes them all, in its order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass

from milescli.core.errors import RecipeError


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, as it applies to one recipe."""

    broken: object
    """Whether the recipe breaks it, by truth."""
    what: str
    _: KW_ONLY
    why: str
    fix: str | list[str]


def refuse(rules: Iterable[Rule]) -> None:
    """Raises RecipeError by the first broken rule; those behind it are not looked at."""
    for rule in rules:
        if rule.broken:
            raise RecipeError(rule.what, why=rule.why, fix=rule.fix)


def divisor_below(number: int, bound: int) -> int:
    """The largest divisor of `number` that is at most `bound`."""
    return next(each for each in range(min(number, bound), 0, -1) if number % each == 0)
