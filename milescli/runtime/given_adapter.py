"""`model.adapter`: whether the adapter that a run is given is what it trains. Called by
`inputs`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.core.errors import RecipeError
from milescli.models import table
from milescli.models.adapter import adapter_table, pairs_of, shared_matrices
from milescli.models.base import WeightTable
from milescli.models.facts import ModelFacts
from milescli.plan.memory import trained_shape
from milescli.recipe.schema import Recipe

if TYPE_CHECKING:
    from milescli.export.adapter import Adapter

_TOLERANCE = 1e-6
"""Of a scaling, relative."""


def require_adapter(recipe: Recipe, facts: ModelFacts) -> ModelFacts:
    """The facts as they are. Raises CheckpointError where `model.adapter` is no PEFT folder,
    RecipeError where it is not of the shape that `train.lora` trains over this model."""
    if recipe.model.adapter is None:
        return facts
    from milescli.export.adapter import read_adapter  # with torch

    adapter, shape = read_adapter(Path(recipe.model.adapter).expanduser()), trained_shape(recipe)
    assert shape is not None, "recipe.check lets no adapter pass that is not trained"
    of_adapter = adapter_table(table(facts), shape)
    wanted, there = set(pairs_of(of_adapter)), set(adapter.pairs)
    scalings = {adapter.scaling(module) for module in there}
    differs = list[tuple[str, str]]()
    if adapter.rank != shape.rank:
        differs.append((f"its rank is {adapter.rank}", f"--lora {adapter.rank}"))
    if any(abs(one - shape.scaling) > _TOLERANCE * shape.scaling for one in scalings):
        alpha = max(scalings) * adapter.rank
        differs.append((f"its alpha is {alpha:g}", f"--set train.lora.alpha={alpha:g}"))
    if adapter.shared.keys() != shared_matrices(of_adapter).keys():
        kind = "shared_outer" if adapter.shared else "each"
        differs.append(
            (
                "its experts share a matrix" if adapter.shared else "its experts share nothing",
                f"--set train.lora.experts={kind}",
            )
        )
    if wanted != there:
        leaves = ", ".join(_leaves(there))
        fix = f"--set 'train.lora.targets=[{leaves}]'"
        if _leaves(wanted) == _leaves(there):
            fix = "--set train.lora.exclude=[]   # or what it leaves out"
        differs.append((f"it has {len(there)} pairs, at {leaves}, and not {len(wanted)}", fix))
    elif adapter.rank == shape.rank and (odd := _misshapen(adapter, of_adapter)):
        differs.append((f"`{odd}` is of another size", "--set model.path=FOLDER   # its base"))
    if adapter.saved:
        saved = min(adapter.saved)
        differs.append((f"it has the whole of `{saved}`, too", "miles export it with --merge"))
    if differs:
        raise RecipeError(
            f"`model.adapter={recipe.model.adapter}` is not what `train.lora` trains",
            why="; ".join(what for what, _ in differs),
            fix=[fix for _, fix in differs],
        )
    return facts


def _leaves(modules: Iterable[str]) -> list[str]:
    return sorted({module.rpartition(".")[2] for module in modules})


def _misshapen(adapter: Adapter, of_adapter: WeightTable) -> str | None:
    sizes = of_adapter.hf_shapes()
    return next(
        (
            module
            for module, places in pairs_of(of_adapter).items()
            for place, tensor in zip(places, adapter.pairs[module], strict=True)
            if tuple(tensor.shape) != sizes[place.name][-2:]
        ),
        None,
    )
