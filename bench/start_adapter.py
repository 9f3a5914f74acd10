"""The LoRA adapter that both sides of a benchmark begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from milescli.export.adapter import adapter_of, write_adapter
from milescli.models import load_facts, table
from milescli.models.adapter import A, adapter_table
from milescli.plan.memory import trained_shape
from milescli.recipe.schema import Recipe


def write_start(folder: Path, model: Path, recipe: dict[str, Any]) -> None:
    """A PEFT folder of the shape that the recipe trains over the model: a random A and a B of
    zeros, of each matrix."""
    shape = trained_shape(Recipe.model_validate(recipe))
    assert shape is not None, recipe
    of_adapter = adapter_table(table(load_facts(model)), shape)
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(size) / size[-1] ** 0.5 if f".{A}." in name else torch.zeros(size)
        for name, size in of_adapter.hf_shapes().items()
    }
    write_adapter(folder, adapter_of(tensors, of_adapter, shape, base_model=model))
