"""The adapter that engines of a LoRA run begin with: of the shape that is trained, and zero, so
that it changes nothing until the first publish."""

from __future__ import annotations

from pathlib import Path

import torch

from milescli.export.adapter import Adapter, is_adapter, write_adapter
from milescli.models import table
from milescli.models.adapter import PEFT_PREFIX, A, B, adapter_table, modules_with_adapter
from milescli.plan.adapters import shape_of
from milescli.runtime.spec import RunSpec

FOLDER = "adapter_start"
"""In the run directory."""


def blank_adapter(spec: RunSpec) -> Path | None:
    """Its PEFT folder, written once; None: the run trains all weights."""
    lora = spec.recipe.train.lora
    if not lora.is_on:
        return None
    folder = spec.run.path / FOLDER
    if not is_adapter(folder):
        shape = shape_of(lora)
        of_adapter = adapter_table(table(spec.inputs.facts), shape)
        shapes = of_adapter.hf_shapes()
        pairs = {
            module: tuple(
                torch.zeros(shapes[f"{PEFT_PREFIX}{module}.{which}.weight"]) for which in (A, B)
            )
            for module in modules_with_adapter(of_adapter)
        }
        write_adapter(
            folder,
            Adapter(
                pairs=pairs,  # type: ignore[arg-type]
                alpha=shape.alpha,
                rank=shape.rank,
                use_rslora=shape.kind == "rslora",
                base_model=str(spec.inputs.model_dir),
            ),
        )
    return folder
