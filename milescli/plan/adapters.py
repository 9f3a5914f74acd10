"""What a recipe's adapter is, for the tables of weights. Pure."""

from __future__ import annotations

from milescli.core.units import format_count
from milescli.models import table
from milescli.models.adapter import LoraShape, adapter_table
from milescli.models.facts import ModelFacts
from milescli.plan.decisions import Log
from milescli.recipe.lora import Lora
from milescli.recipe.schema import Recipe


def trained_shape(recipe: Recipe) -> LoraShape | None:
    """None: the recipe trains all weights."""
    return shape_of(recipe.train.lora) if recipe.train.lora.is_on else None


def note_adapter(recipe: Recipe, facts: ModelFacts, log: Log) -> None:
    """How much is trained, where it is an adapter. Raises RecipeError where none fits the model."""
    shape = trained_shape(recipe)
    if shape is None:
        return
    base = table(facts)
    numbers, of_base = adapter_table(base, shape).num_parameters, base.num_parameters
    log.note(
        "adapter",
        f"rank {shape.rank}",
        f"{format_count(numbers)} of {format_count(of_base)} numbers are trained "
        f"({100 * numbers / of_base:.2g} %); the others have neither gradient nor optimizer",
    )


def shape_of(lora: Lora) -> LoraShape:
    """`lora.is_on`."""
    assert lora.rank is not None, "an adapter has a rank"
    assert lora.type != "dora", "recipe.check refuses it"
    return LoraShape(
        rank=lora.rank,
        alpha=lora.alpha if lora.alpha is not None else 2.0 * lora.rank,
        targets=tuple(lora.targets),
        exclude=tuple(lora.exclude),
        kind=lora.type,
        experts=lora.experts,
    )
