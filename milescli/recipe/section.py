"""Defines the base of every section: strict (unknown keys are refused) and frozen; the types of
numbers that its keys take; how a value is written on one line; and rules, each a row with what a
recipe may not combine, and the error that says so. Each section's module yields its own rules;
`check` applies all of them in order."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Annotated, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from milescli.core.errors import RecipeError

T = TypeVar("T")
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
"""Seed that every library takes; those of NumPy end at 2**32, and ours are multiplied."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Names = str | list[str]
"""One name, or several."""
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
_BARE = re.compile(r"[A-Za-z0-9_./:-][^\n]*\Z")
"""A text that `--set` reads without quotes of YAML."""


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


def scalar_yaml(value: object) -> str:
    """Write a value on one line, as a recipe reads it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Section):
        return scalar_yaml(plain(value))
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{scalar_yaml(k)}: {scalar_yaml(v)}" for k, v in value.items()) + "}"
        )
    if isinstance(value, list):
        return f"[{', '.join(map(scalar_yaml, value))}]"
    if isinstance(value, str):
        style = {
            "default_style": '"',
            "default_flow_style": True,
            "allow_unicode": True,
            "width": float("inf"),
        }
        return yaml.safe_dump(value, **style).rstrip("\n")
    if math.isfinite(value):
        return repr(value)
    return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"


def set_option(key: str, value: object) -> str:
    """Return the option that sets the key to the value, as a shell and a recipe read it, for a
    fix: `--set 'data.prompts=["a.jsonl", "b.jsonl"]'`."""
    is_bare = isinstance(value, str) and _BARE.match(value) and value.lower() != "null"
    return f"--set {shlex.quote(f'{key}={value if is_bare else scalar_yaml(value)}')}"


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
