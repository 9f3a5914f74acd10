"""What every section of a recipe is: strict (unknown keys are refused) and frozen; and the numbers
that its keys take."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

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
    """A value of a recipe as JSON holds it: sections in a list or a mapping are mappings, without
    what is null."""
    if isinstance(value, Section):
        return value.model_dump(exclude_none=True)
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value
