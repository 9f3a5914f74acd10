"""The LoRA adapter that both sides of a benchmark begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from milescli.export.adapter import Adapter, write_adapter
from milescli.models import load_facts, table
from milescli.models.adapter import A, B, adapter_table, modules_with_adapter, peft_name
from milescli.plan.adapters import trained_shape
from milescli.recipe.schema import Recipe


def write_start(folder: Path, model: Path, recipe: dict[str, Any]) -> None:
    """A PEFT folder of the shape that the recipe trains over the model: a random A and a B of
    zeros, of each matrix."""
    shape = trained_shape(Recipe.model_validate(recipe))
    assert shape is not None, recipe
    of_adapter = adapter_table(table(load_facts(model)), shape)
    sizes = of_adapter.hf_shapes()
    torch.manual_seed(0)
    pairs = {}
    for module in modules_with_adapter(of_adapter):
        first, second = (sizes[peft_name(module, which)] for which in (A, B))
        pairs[module] = (torch.randn(first) / first[1] ** 0.5, torch.zeros(second))
    write_adapter(folder, Adapter(pairs=pairs, alpha=shape.alpha, rank=shape.rank))
