"""In which numbers a model is computed."""

from __future__ import annotations

from typing import Literal

from milescli.plan.decisions import Log
from milescli.platform.machine import Machine
from milescli.recipe.schema import Recipe

SIZES = {"bf16": 2, "fp32": 4}
"""Bytes of a weight."""


def choose_precision(recipe: Recipe, machine: Machine, log: Log) -> Literal["bf16", "fp32"]:
    """As the recipe pins it, else by the device."""
    if recipe.train.precision != "auto":
        log.note("precision", recipe.train.precision, "pinned by `train.precision`")
        return recipe.train.precision
    on_cpu = machine.kind == "cpu" or recipe.machine.gpus == 0
    log.note(
        "precision",
        "fp32" if on_cpu else "bf16",
        "a CPU gains nothing from bf16" if on_cpu else "the accelerator's native format",
    )
    return "fp32" if on_cpu else "bf16"
