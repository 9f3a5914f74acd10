"""The adapter that engines of a LoRA run begin with: of the shape that is trained, and zero, so
that it changes nothing until the first publish."""

from __future__ import annotations

from pathlib import Path

import torch

from milescli.export.adapter import Adapter, is_adapter, write_adapter
from milescli.models import table
from milescli.models.adapter import A, B, adapter_table, modules_with_adapter, peft_name
from milescli.plan.adapters import trained_shape
from milescli.runtime.spec import RunSpec

FOLDER = "adapter_start"
"""In the run directory."""


def start_folder(spec: RunSpec) -> Path | None:
    """Where it lies; None: nothing is trained, or all weights are."""
    trains = any(slot.trainer_rank is not None for slot in spec.plan.slots)
    return spec.run.path / FOLDER if trains and spec.recipe.train.lora.is_on else None


def write_start(spec: RunSpec) -> None:
    """As a PEFT folder, once; nothing where there is none."""
    folder, shape = start_folder(spec), trained_shape(spec.recipe)
    if folder is None or shape is None or is_adapter(folder):
        return
    of_adapter = adapter_table(table(spec.inputs.facts), shape)
    shapes = of_adapter.hf_shapes()

    def zeros(module: str, which: str) -> torch.Tensor:
        return torch.zeros(shapes[peft_name(module, which)])

    pairs = {
        module: (zeros(module, A), zeros(module, B)) for module in modules_with_adapter(of_adapter)
    }
    adapter = Adapter(
        pairs=pairs,
        alpha=shape.alpha,
        rank=shape.rank,
        use_rslora=shape.kind == "rslora",
        base_model=str(spec.inputs.model_dir),
    )
    write_adapter(folder, adapter)
