"""`train.lora`: what is trained beside a frozen model, instead of it. Part of the schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from milescli.models.adapter import ALL_LINEAR, LoraShape
from milescli.recipe.section import Positive, PositiveFloat, Section

if TYPE_CHECKING:
    from milescli.recipe.schema import Recipe


class Lora(Section):
    """A low-rank adapter (arXiv 2106.09685): y = W x + scaling * B A x, and W stays as it is."""

    rank: Positive | None = None
    """r of A [r, in] and B [out, r]; null: no adapter, all weights are trained."""
    alpha: PositiveFloat | None = None
    """scaling = alpha / r (rslora: / sqrt(r)); null: twice the rank."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Of x before A, while gradients are computed; runs that sample have none."""
    targets: list[str] = Field(default=[ALL_LINEAR], min_length=1)
    """Last parts of module names, as folders have them (q_proj); all-linear: every matrix of the
    layers that can have an adapter."""
    exclude: list[str] = Field(default=[])
    """Of those, the ones that have none; a part of the whole name, too (experts, layers.0)."""
    type: Literal["lora", "rslora"] = "lora"

    @property
    def is_on(self) -> bool:
        """An adapter is trained."""
        return self.rank is not None


def shape_of(lora: Lora) -> LoraShape:
    """For the table of its weights. `lora.is_on`."""
    assert lora.rank is not None, "an adapter has a rank"
    return LoraShape(
        rank=lora.rank,
        alpha=lora.alpha if lora.alpha is not None else 2.0 * lora.rank,
        targets=tuple(lora.targets),
        exclude=tuple(lora.exclude),
        kind=lora.type,
    )


def trained_shape(recipe: Recipe) -> LoraShape | None:
    """None: the recipe trains all weights."""
    return shape_of(recipe.train.lora) if recipe.train.lora.is_on else None
