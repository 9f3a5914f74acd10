"""`model.adapter`: whether the adapter that a run is given is what it trains. Called by
`inputs`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.core.errors import RecipeError
from milescli.models import table
from milescli.models.adapter import A, B, adapter_table, modules_with_adapter, peft_name
from milescli.models.facts import ModelFacts
from milescli.plan.adapters import trained_shape
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
    wanted, there = set(modules_with_adapter(of_adapter)), set(adapter.pairs)
    scalings = {adapter.scaling(module) for module in there}
    differs, sizes = [], of_adapter.hf_shapes()
    if adapter.rank != shape.rank:
        differs.append((f"its rank is {adapter.rank}", f"--lora {adapter.rank}"))
    if any(abs(one - shape.scaling) > _TOLERANCE * shape.scaling for one in scalings):
        alpha = max(scalings) * adapter.rank
        differs.append((f"its alpha is {alpha:g}", f"--set train.lora.alpha={alpha:g}"))
    if wanted != there:
        leaves = ", ".join(_leaves(there))
        fix = f"--set 'train.lora.targets=[{leaves}]'"
        if _leaves(wanted) == _leaves(there):
            fix = "--set train.lora.exclude=[]   # or what it leaves out"
        differs.append((f"it has {len(there)} pairs, at {leaves}, and not {len(wanted)}", fix))
    elif adapter.rank == shape.rank and (odd := _misshapen(adapter, sizes)):
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


def _misshapen(adapter: Adapter, sizes: Mapping[str, tuple[int, ...]]) -> str | None:
    return next(
        (
            module
            for module, pair in adapter.pairs.items()
            for which, tensor in zip((A, B), pair, strict=True)
            if tuple(tensor.shape) != sizes[peft_name(module, which)]
        ),
        None,
    )
