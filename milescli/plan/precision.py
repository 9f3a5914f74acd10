"""In which number formats trainer and engines multiply: from `train.precision` and
`rollout.precision`, with the reason, and which weights that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from milescli.core.errors import FitError, MilesError
from milescli.models.base import WeightTable
from milescli.models.precision import Choice, Cut, Quantised, choose, with_single_experts
from milescli.plan.types import EngineLayout, Log, Plan, TrainerLayout
from milescli.recipe.schema import Recipe

OF_TRAINER: Mapping[str, Quantised] = {
    "fp8_block": "fp8",
    "mxfp8": "mxfp8",
    "int4_qat": "int4",
    "nvfp4": "nvfp4",
}
"""`train.precision` -> format of the weights that the trainer multiplies by."""
OF_ENGINES: Mapping[str, Quantised] = {
    "fp8_block": "fp8",
    "mxfp8": "mxfp8",
    "int4": "int4",
    "nvfp4": "nvfp4",
}
"""`rollout.precision` -> format of the weights that engines hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Names the formats of a run; None: plain weights."""

    trainer: Quantised | None
    quantises_inputs: bool
    engines: Quantised | None


def choose_formats(recipe: Recipe, *, on_cpu: bool, merges_adapter: bool, log: Log) -> Formats:
    """Return the formats that the recipe asks for, and log why. `merges_adapter` says that engines
    are sent the model with a trained adapter merged in."""
    trainer = OF_TRAINER.get(recipe.train.precision)
    if trainer is not None:
        log.note(
            "trainer_format",
            trainer,
            f"`train.precision={recipe.train.precision}`: rounded weights, gradients of the weights"
            " as they are, optimizer on the weights as they are",
        )
    inputs = recipe.train.quantise_inputs
    reason = "pinned by `train.quantise_inputs`"
    if inputs is None:
        inputs = not on_cpu and trainer not in (None, "int4")
        reason = (
            "engines on a CPU do not, and a rounded input is a step function: products that differ "
            "by 1e-7 would round to other numbers"
            if on_cpu
            else "as engines on accelerators do"
            if inputs
            else "engines multiply INT4 weights by inputs of 16 bits"
        )
    inputs = inputs and trainer is not None
    if trainer is not None:
        log.note("quantises_inputs", inputs, reason)
    asked = recipe.rollout.precision
    if asked != "same":
        engines = OF_ENGINES.get(asked)
        reason = f"pinned by `rollout.precision={asked}`"
    elif trainer is not None and merges_adapter:
        engines, reason = None, "the adapter is merged into rounded weights, which stay plain then"
    else:
        engines, reason = trainer, "the trainer's own numbers"
    if recipe.has_engines and (engines or trainer):
        log.note("engine_format", engines or "plain", reason)
    return Formats(trainer=trainer, quantises_inputs=inputs, engines=engines)


def cuts(trainer: TrainerLayout, engines: EngineLayout) -> tuple[Cut, ...]:
    """Return into how many parts trainer and engines cut matrices."""
    of_engines = Cut(dense=engines.tp, experts=max(engines.tp // max(engines.ep, 1), 1))
    return (Cut(dense=trainer.tp, experts=trainer.etp), of_engines)


def quantised(
    table: WeightTable, form: Quantised | None, plan: Plan, recipe: Recipe
) -> Mapping[str, Choice]:
    """Return the choice for each tensor of the model, under the names of quantised folders; empty
    without a format. Trainer and engines of a plan have the same choices. Raises FitError if the
    format applies to no tensor under the plan's layouts."""
    if form is None:
        return {}
    try:
        return choose(
            with_single_experts(table),
            form,
            cuts=cuts(plan.trainer, plan.engines),
            exempt=recipe.train.exempt,
        )
    except MilesError as error:
        raise FitError(error.what, why=error.why, fix="--set train.precision=auto") from error
