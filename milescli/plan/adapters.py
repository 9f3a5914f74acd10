"""What a recipe's adapter is, for the tables of weights. Pure."""

from __future__ import annotations

from milescli.models.adapter import LoraShape
from milescli.recipe.lora import Lora
from milescli.recipe.schema import Recipe


def trained_shape(recipe: Recipe) -> LoraShape | None:
    """None: the recipe trains all weights."""
    return shape_of(recipe.train.lora) if recipe.train.lora.is_on else None


def shape_of(lora: Lora) -> LoraShape:
    """`lora.is_on`."""
    assert lora.rank is not None, "an adapter has a rank"
    return LoraShape(
        rank=lora.rank,
        alpha=lora.alpha if lora.alpha is not None else 2.0 * lora.rank,
        targets=tuple(lora.targets),
        exclude=tuple(lora.exclude),
        kind=lora.type,
    )
