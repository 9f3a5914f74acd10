"""Defines the base of every section: strict (unknown keys are refused) and frozen; the types of
numbers that its keys take; and rules, each a row with what a recipe may not combine, and the error
that says so. Each section's module yields its own rules; `check` applies all of them in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from milescli.core.errors import RecipeError

T = TypeVar("T")
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Names = str | list[str]
"""One name, or several."""
NonNegativeFloat = Annotated[float, Field(ge=0.0)]


class Section(BaseModel):
    """A part of the recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def plain(value: object) -> object:
    """Convert a value of a recipe to JSON values: sections in a list or a mapping become mappings,
    without null values."""
    if isinstance(value, Section):
        return value.model_dump(exclude_none=True)
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


def of_type(kind: type[T], value: object) -> T:
    """Make a dataclass from plain values. Raises ValueError if a field is missing or has another
    type; additional fields are ignored."""
    return _adapter(kind).validate_python(value)


@lru_cache(maxsize=64)
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)


@dataclass(frozen=True, slots=True)
class Rule:
    """Holds a rule that was evaluated for one recipe."""

    broken: object
    """Truthy if the recipe breaks the rule."""
    what: str
    _: KW_ONLY
    why: str
    fix: str | list[str]


def refuse(rules: Iterable[Rule]) -> None:
    """Raise RecipeError for the first broken rule; later ones are not evaluated."""
    for rule in rules:
        if rule.broken:
            raise RecipeError(rule.what, why=rule.why, fix=rule.fix)


LARGEST_DIVISOR = 1 << 20
"""Largest divisor that a fix proposes: trying larger ones would take too long."""


def divisor_below(number: int, bound: int) -> int:
    """Return the largest divisor of `number` that is at most `bound`, or LARGEST_DIVISOR."""
    largest = min(number, bound, LARGEST_DIVISOR)
    return next(each for each in range(largest, 0, -1) if number % each == 0)
