"""The adapter that engines of a LoRA run begin with: of the shape that is trained, and zero, so
that it changes nothing until the first publish."""

from __future__ import annotations

from pathlib import Path

import torch

from milescli.export.adapter import adapter_of, is_adapter, write_adapter
from milescli.models import table
from milescli.models.adapter import adapter_table
from milescli.plan.memory import trained_shape
from milescli.runtime.spec import RunSpec

FOLDER = "adapter_start"
"""In the run directory."""


def start_folder(spec: RunSpec) -> Path | None:
    """Where it lies; None: nothing is trained, or engines are sent whole models."""
    trains = any(slot.trainer_rank is not None for slot in spec.plan.slots)
    serves = spec.recipe.train.lora.is_on and not spec.plan.merges_adapter
    return spec.run.path / FOLDER if trains and serves else None


def write_start(spec: RunSpec) -> None:
    """As a PEFT folder, once; nothing where there is none."""
    folder, shape = start_folder(spec), trained_shape(spec.recipe)
    if folder is None or shape is None or is_adapter(folder):
        return
    of_adapter = adapter_table(table(spec.inputs.facts), shape)
    zeros = {name: torch.zeros(size) for name, size in of_adapter.hf_shapes().items()}
    base_model = spec.inputs.model_dir
    write_adapter(folder, adapter_of(zeros, of_adapter, shape, base_model=base_model))
