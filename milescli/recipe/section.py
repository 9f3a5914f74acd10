"""What every section of a recipe is: strict (unknown keys are refused) and frozen; the numbers that
its keys take; and validation rules as rows: what a recipe may not combine, and the error that says
so. Each section's module yields its own rows; `check` takes them all, in its order."""

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
    """Make a dataclass of plain values. Raises ValueError if a field is missing or has
    another type; further ones are ignored."""
    return _adapter(kind).validate_python(value)


@lru_cache(maxsize=64)
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule, applied to one recipe."""

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
"""Of a number that is proposed in a fix: larger ones are not tried, as that takes as long."""


def divisor_below(number: int, bound: int) -> int:
    """Return the largest divisor of `number` that is at most `bound`, or LARGEST_DIVISOR."""
    largest = min(number, bound, LARGEST_DIVISOR)
    return next(each for each in range(largest, 0, -1) if number % each == 0)
