"""What a recipe's adapter is, for the tables of weights. Pure."""

from __future__ import annotations

from functools import lru_cache

from milescli.core.units import format_count
from milescli.models import table
from milescli.models.adapter import LoraShape, adapter_table, engine_slots
from milescli.models.facts import ModelFacts
from milescli.plan.memory import MemoryModel, memory_model
from milescli.plan.types import Log
from milescli.recipe.lora import Lora
from milescli.recipe.schema import Recipe


def trained_shape(recipe: Recipe) -> LoraShape | None:
    """None: the recipe trains all weights."""
    return shape_of(recipe.train.lora) if recipe.train.lora.is_on else None


def memory_of(recipe: Recipe, facts: ModelFacts, *, merged: bool = False) -> MemoryModel:
    """Memory of the recipe's model, and of what is trained of it. `merged`: as `publishes_merged`
    says. Raises RecipeError where no adapter of the recipe's shape fits it."""
    if (shape := trained_shape(recipe)) is None:
        return memory_model(facts)
    return _beside(facts, shape, 0 if merged else engine_slots(len(recipe.adapters)))


@lru_cache(maxsize=8)
def _beside(facts: ModelFacts, shape: LoraShape, slots: int) -> MemoryModel:
    base = table(facts)
    return MemoryModel(base, adapter_table(base, shape), slots)


def publishes_merged(recipe: Recipe, *, on_cpu: bool, size: int) -> bool:
    """Whether engines are sent the model with the adapter merged in. `size`: bytes of a weight. In
    two bytes the sum would be rounded, and the engines would sample from another policy than the
    one that is trained."""
    lora = recipe.train.lora
    if not lora.is_on or lora.publish != "auto":
        return lora.is_on and lora.publish == "merged"
    return on_cpu and size == 4 and not recipe.adapters


def note_publishing(recipe: Recipe, *, merged: bool, log: Log) -> None:
    """What engines are sent, where an adapter is trained."""
    if not recipe.train.lora.is_on or not recipe.has_engines:
        return
    if recipe.train.lora.publish != "auto":
        why = "pinned by `train.lora.publish`"
    elif merged:
        why = "on a CPU an engine computes the model alone sooner than with an adapter beside it"
    else:
        why = "engines compute it beside the frozen model"
    log.note("adapter.publish", "merged" if merged else "adapter", why)


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
