"""Chooses the number formats in which trainer and engines multiply, from `train.precision` and
`rollout.precision`, with the reason, and the weights to which they apply."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from milescli import models
from milescli.core.errors import FitError, MilesError
from milescli.models.base import WeightTable
from milescli.models.facts import ModelFacts
from milescli.models.precision import (
    FORMATS,
    Choice,
    Cut,
    Quantised,
    choose,
    with_single_experts,
)
from milescli.plan.types import EngineLayout, Log, TrainerLayout
from milescli.platform.machine import Device
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


ENGINE_KERNELS: Mapping[Quantised, tuple[int, tuple[str, ...]]] = {
    "fp8": (89, ("gfx942", "gfx950")),
    "mxfp8": (100, ("gfx942", "gfx950")),
    "int4": (80, ()),
    "nvfp4": (80, ()),
}
"""Format -> the lowest compute capability of NVIDIA's devices, and the architectures of AMD's, for
which SGLang 0.5.20 has kernels for such weights. INT4 and NVFP4 use Marlin, which needs CUDA."""


EXACT_INPUTS: tuple[Quantised, ...] = ("fp8", "mxfp8")
"""Formats that round the inputs of each token separately. The tokens of an NVFP4 product share a
global scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Names the number formats of a run; None: plain weights."""

    trainer: Quantised | None
    engines: Quantised | None


PLAIN_FORMATS = Formats(trainer=None, engines=None)


def formats_of(recipe: Recipe, *, merges_adapter: bool) -> Formats:
    """Return the formats that the recipe selects. `merges_adapter`: engines get the model with a
    trained adapter merged in."""
    trainer = OF_TRAINER.get(recipe.train.precision)
    same = None if merges_adapter else trainer
    engines = (
        same if recipe.rollout.precision == "same" else OF_ENGINES.get(recipe.rollout.precision)
    )
    return Formats(trainer=trainer, engines=engines if recipe.has_engines else None)


def note_formats(
    recipe: Recipe,
    facts: ModelFacts,
    formats: Formats,
    layouts: tuple[TrainerLayout, EngineLayout],
    *,
    on_cpu: bool,
    log: Log,
) -> bool:
    """Log the formats, the reason, and which matrices stay plain. Return True if the inputs of
    quantised layers are rounded too. Raises FitError if a format applies to no matrix under the
    layouts."""
    trainer, requested = formats.trainer, recipe.rollout.precision
    rounds_inputs = _quantises_inputs(recipe, formats, on_cpu=on_cpu)
    if trainer is not None:
        log.note(
            "trainer_format",
            trainer,
            f"`train.precision={recipe.train.precision}`: products with rounded weights, the "
            "gradient and the optimizer on weights as they are",
        )
        why = "pinned by `train.quantise_inputs`"
        if recipe.train.quantise_inputs is None:
            why = _why_inputs(recipe, formats, on_cpu=on_cpu)
        log.note("quantises_inputs", rounds_inputs, why)
    if recipe.has_engines and (formats.engines or trainer):
        reason = f"pinned by `rollout.precision={requested}`"
        if requested == "same" and trainer != formats.engines:
            reason = "the adapter is merged into rounded weights, which stay plain then"
        elif requested == "same":
            reason = "the trainer's own numbers"
        log.note("engine_format", formats.engines or "plain", reason)
    for form in dict.fromkeys(filter(None, (trainer, formats.engines))):
        choices = quantised(models.table(facts), form, layouts, recipe.train.exempt)
        _note_choices(form, choices, log)
    return rounds_inputs


def require_kernels(formats: Formats, device: Device) -> None:
    """Raise FitError if engines on the device have no kernel for their format."""
    if formats.engines is None:
        return
    least, of_amd = ENGINE_KERNELS[formats.engines]
    number = device.arch.removeprefix("sm_")
    fits = int(number) >= least if number.isdigit() else device.arch in of_amd
    if fits or not device.arch:
        return
    known = f"NVIDIA devices from compute capability {least / 10:.1f}" + "".join(
        f", AMD's {arch}" for arch in of_amd
    )
    raise FitError(
        f"engines on {device.name} cannot use weights in {formats.engines.upper()}",
        why=f"SGLang 0.5.20 has kernels for {known}, but this is {device.arch}",
        fix="--set rollout.precision=bf16   # send the trainer's numbers without quantisation",
    )


def _quantises_inputs(recipe: Recipe, formats: Formats, *, on_cpu: bool) -> bool:
    if formats.trainer is None:
        return False
    if (pinned := recipe.train.quantise_inputs) is not None:
        return pinned
    if on_cpu:
        is_same = recipe.train.on_policy == "exact" and formats.engines == formats.trainer
        return is_same and formats.trainer in EXACT_INPUTS
    return formats.trainer != "int4"


def _why_inputs(recipe: Recipe, formats: Formats, *, on_cpu: bool) -> str:
    if formats.trainer == "int4":
        return "engines multiply INT4 weights by inputs that are not rounded"
    if not on_cpu:
        return "as engines do"
    if recipe.train.on_policy != "exact":
        return (
            "a rounded input is a step function: on a CPU products of engine and trainer differ by "
            "1e-7, and would round to other numbers; with `train.on_policy=exact` they are equal"
        )
    if formats.trainer in EXACT_INPUTS and formats.engines == formats.trainer:
        return "as on an accelerator: `train.on_policy=exact`, so they round to the same numbers"
    return "engines on a CPU would round them to other numbers"


def _note_choices(form: Quantised, choices: Mapping[str, Choice], log: Log) -> None:
    """Log how much is quantised, and which weights stay plain, in one line per reason."""
    matrices = [choice for choice in choices.values() if len(choice.shape) >= 2]
    numbers = [prod(choice.shape) for choice in matrices]
    in_form = [prod(choice.shape) for choice in matrices if choice.form]
    log.note(
        f"{form}.matrices",
        f"{len(in_form)} of {len(matrices)}",
        f"{sum(in_form) / sum(numbers):.1%} of the weights; the others stay plain:",
    )
    plain: dict[tuple[str, str], int] = {}
    for choice in matrices:
        if choice.form is None:
            reason = re.sub(r"`[^`]*`", lambda name: _pattern(name[0]), choice.reason)
            key = (_pattern(choice.name), reason)
            plain[key] = plain.get(key, 0) + 1
    for (name, reason), count in plain.items():
        log.note(f"{form}.plain", f"{count} x {name}" if count > 1 else name, reason)


def _pattern(name: str) -> str:
    """Return the pattern of a name: `model.layers.3.mlp.experts.7.up_proj.weight` ->
    `layers.*.mlp.experts.*.up_proj`."""
    plain = name.replace(".weight", "").replace("model.", "")
    return re.sub(r"\.\d+(?=\.)", ".*", plain)


def cuts(layouts: tuple[TrainerLayout, EngineLayout]) -> tuple[Cut, ...]:
    """Return the number of parts into which trainer and engines divide matrices."""
    trainer, engines = layouts
    return (Cut(dense=trainer.tp, experts=trainer.etp), engine_cut(engines))


def engine_cut(engines: EngineLayout) -> Cut:
    """Return the number of parts into which engines divide matrices."""
    return Cut(dense=engines.tp, experts=max(engines.tp // max(engines.ep, 1), 1))


def quantised(
    table: WeightTable,
    form: Quantised | None,
    layouts: tuple[TrainerLayout, EngineLayout],
    exempt: Sequence[str],
) -> Mapping[str, Choice]:
    """Return the choice for each tensor of the model, under the names of quantised folders; empty
    without a format. Trainer and engines of a plan have the same choices. Raises FitError if the
    format applies to no tensor under the layouts."""
    if form is None:
        return {}
    try:
        return choose(with_single_experts(table), form, cuts=cuts(layouts), exempt=exempt)
    except MilesError as error:
        fixes = ["--set train.precision=auto --set rollout.precision=same"]
        raise FitError(error.what, why=error.why, fix=fixes) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedSize:
    """Counts the weights of one rank that are in a format."""

    numbers: int = 0
    size_bytes: int = 0
    """Bytes of numbers and scales."""
    expert_numbers: int = 0
    expert_bytes: int = 0
    """Of these, those of routed experts."""


def quantised_size(
    facts: ModelFacts,
    form: Quantised,
    *,
    cut: Cut,
    ep: int,
    exempt: tuple[str, ...],
    layers: range | None = None,
) -> QuantisedSize:
    """Return the size of one rank's weights in the format. `cut`: how its side divides matrices;
    `ep`: number of ranks among which experts are divided; `layers`: those of the rank, None: all.
    MTP layers, if they are trained, are numbered after the others."""
    numbers = size = expert_numbers = expert_bytes = 0
    for layer, (experts, one) in _quantised_size_by_layer(facts, form, cut, exempt):
        if layers is None or (layer is not None and layer in layers):
            times = -(-experts // ep) if experts else 1
            numbers += times * one.numbers
            size += times * one.size_bytes
            if experts:
                expert_numbers += times * one.numbers
                expert_bytes += times * one.size_bytes
    return QuantisedSize(
        numbers=numbers,
        size_bytes=size,
        expert_numbers=expert_numbers,
        expert_bytes=expert_bytes,
    )


@lru_cache(maxsize=64)
def _quantised_size_by_layer(
    facts: ModelFacts, form: Quantised, cut: Cut, exempt: tuple[str, ...]
) -> list[tuple[int | None, tuple[int, QuantisedSize]]]:
    """Return [(layer, (number of experts of this size, or 0 for other weights; size on a rank of
    one of them))]. Cached, so that a search over layouts makes the choices once for each way to
    divide matrices."""
    table = with_single_experts(models.table(facts))
    try:
        choices = choose(table, form, cuts=(cut,), exempt=exempt, alike=True)
    except MilesError:
        return []
    sizes = dict[tuple[int | None, int], QuantisedSize]()
    for entry, count in table.counted:
        if not table.holds(entry):
            continue  # engines hold such MTP layers no more than trainers do
        sharding, is_expert = entry.rule.sharding, entry.expert is not None
        parts = cut.experts if is_expert else cut.dense
        layer = entry.layer if entry.mtp is None else facts.num_layers + entry.mtp
        key = (layer, count if is_expert else 0)
        for name, shape in zip(entry.hf, entry.shapes, strict=True):
            if choices[name].form is None:
                continue
            own = list(shape)
            if sharding.axis != "none":
                own[sharding.dim] //= parts
            so_far = sizes.get(key, QuantisedSize())
            sizes[key] = QuantisedSize(
                numbers=so_far.numbers + prod(own),
                size_bytes=so_far.size_bytes + FORMATS[form].bytes_of(own),
            )
    return [(layer, (experts, one)) for (layer, experts), one in sizes.items()]
