"""What a recipe's adapter is, for the tables of weights. Pure."""

from __future__ import annotations

from functools import lru_cache

from milescli.core.units import format_count
from milescli.models import table
from milescli.models.adapter import LoraShape, adapter_table, engine_slots
from milescli.models.facts import ModelFacts
from milescli.plan.decisions import Log
from milescli.plan.memory import MemoryModel, memory_model
from milescli.recipe.lora import Lora
from milescli.recipe.schema import Recipe


def trained_shape(recipe: Recipe) -> LoraShape | None:
    """None: the recipe trains all weights."""
    return shape_of(recipe.train.lora) if recipe.train.lora.is_on else None


def memory_of(recipe: Recipe, facts: ModelFacts) -> MemoryModel:
    """Of the recipe's model, and of what is trained of it. Raises RecipeError where no adapter of
    the recipe's shape fits it."""
    if (shape := trained_shape(recipe)) is None:
        return memory_model(facts)
    return _beside(facts, shape, engine_slots(len(recipe.adapters)))


@lru_cache(maxsize=8)
def _beside(facts: ModelFacts, shape: LoraShape, slots: int) -> MemoryModel:
    base = table(facts)
    return MemoryModel(base, adapter_table(base, shape), slots)


def note_adapter(recipe: Recipe, facts: ModelFacts, log: Log) -> None:
    """How much is trained, where it is an adapter. Raises RecipeError where none fits the model."""
    shape = trained_shape(recipe)
    if shape is None:
        return
    base = table(facts)
    numbers, of_base = adapter_table(base, shape).num_parameters, base.num_parameters
    log.note(
        "adapter",
        f"rank {shape.rank}" + (f" x {len(recipe.adapters)}" if recipe.adapters else ""),
        f"{format_count(numbers)} of {format_count(of_base)} numbers are trained "
        f"({100 * numbers / of_base:.2g} %); the others have neither gradient nor optimizer"
        + (f"; {', '.join(recipe.adapters)} take turns" if recipe.adapters else ""),
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
