"""Makes a plan from a recipe and a machine: legal layouts, placement, batch arithmetic, each choice
with its reason. The entry point of this package; pure, no torch, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from milescli.core.errors import FitError
from milescli.core.units import format_duration
from milescli.models.facts import ModelFacts
from milescli.plan.choices import (
    WEIGHT_BYTES,
    batch_plan,
    choose_precision,
    note_experts,
    note_indexer,
    note_mtp,
    note_speculation,
    note_vision,
)
from milescli.plan.collectors import choose_collectors
from milescli.plan.forecast import forecast
from milescli.plan.legal import check_layout
from milescli.plan.main_memory import MemoryFit, fit_main_memory
from milescli.plan.memory import memory_of, note_adapter, note_publishing, publishes_merged
from milescli.plan.on_cpu import engines_on_cpu, trainer_on_cpu, why_not_two_engines
from milescli.plan.on_devices import TrainerEnginePair, engine_context, plan_devices
from milescli.plan.on_policy import choose_on_policy
from milescli.plan.placement import (
    assign_slots,
    choose_channel,
    choose_placement,
    devices_per_node,
    note_idle_devices,
)
from milescli.plan.precision import formats_of, note_formats, require_kernels
from milescli.plan.reasons import with_remedies
from milescli.plan.roles import (
    NO_QUERIED_MODELS,
    QueriedModels,
    roles_of,
    teacher_roles,
    without_reward_model,
)
from milescli.plan.transport import note_transfer, plan_store
from milescli.plan.types import (
    NO_ENGINES,
    EngineLayout,
    Log,
    Plan,
    ProcessMemory,
    Role,
    Slot,
    TrainerLayout,
)
from milescli.platform.machine import Machine
from milescli.recipe.schema import Recipe


def make_plan(
    recipe: Recipe,
    machine: Machine,
    facts: ModelFacts,
    queried: QueriedModels = NO_QUERIED_MODELS,
) -> Plan:
    """Plan this recipe on this machine. `facts`: of the policy; `queried`: the other models. Raises
    FitError with the equation if a pin is illegal or does not fit, with fixes that were tried."""

    def plans(other: Recipe) -> Plan:
        return _planned(other, machine, facts, queried)

    if devices_per_node(recipe, machine, Log()):
        merges = publishes_merged(recipe, on_cpu=False, size=WEIGHT_BYTES["bf16"])
        formats = formats_of(recipe, merges_adapter=merges)
        try:
            require_kernels(formats, machine.nodes[0].devices[0])
        except FitError as error:
            raise with_remedies(error, recipe, machine, plans, only_proposed=True) from None
    try:
        return plans(recipe)
    except FitError as error:
        raise with_remedies(error, recipe, machine, plans) from None


def try_plan(recipe: Recipe, machine: Machine, facts: ModelFacts) -> Plan | None:
    """Return the plan, or None if nothing fits. Faster than `make_plan` on failure, since it
    searches no fixes."""
    try:
        return _planned(recipe, machine, facts)
    except FitError:
        return None


def _planned(
    recipe: Recipe, machine: Machine, facts: ModelFacts, queried: QueriedModels = NO_QUERIED_MODELS
) -> Plan:
    """Make the plan. With `engines.placement: auto`, use the other placement if the first does not
    fit."""
    log = Log()
    per_node = devices_per_node(recipe, machine, log)
    note_adapter(recipe, facts, log)
    note_mtp(recipe, facts, log)
    note_vision(facts, log)
    note_indexer(facts, log)
    if queried.reward is not None:
        size = WEIGHT_BYTES[choose_precision(recipe, machine, Log())]
        machine = without_reward_model(
            recipe, machine, queried.reward, size=size, on_cpu=per_node == 0, log=log
        )
    inputs = _PlanInputs(
        recipe=recipe, machine=machine, facts=facts, teachers=queried.teachers, per_node=per_node
    )
    if inputs.num_devices == 0:
        return _on_cpu(inputs, log)
    colocated, reason = choose_placement(recipe, inputs.num_devices)
    noted = list(log.decisions)
    try:
        return _on_devices(inputs, log, colocated=colocated, reason=reason)
    except FitError as error:
        if recipe.engines.placement != "auto" or recipe.engines_apart or inputs.num_devices == 1:
            raise
        reason = (
            f"{'sharing devices' if colocated else 'devices of their own'} would not do: "
            f"{error.what}"
        )
        log = Log(decisions=noted)
        try:
            return _on_devices(inputs, log, colocated=not colocated, reason=reason)
        except FitError:
            raise error from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanInputs:
    """Holds the recipe, the model and the machine of a plan."""

    recipe: Recipe
    machine: Machine
    facts: ModelFacts
    teachers: Sequence[ModelFacts]
    per_node: int
    """Devices per node; 0: the CPU."""

    @property
    def num_devices(self) -> int:
        return self.per_node * self.recipe.machine.nodes


def _on_cpu(inputs: _PlanInputs, log: Log) -> Plan:
    recipe = inputs.recipe
    colocated, reason = choose_placement(recipe, None)
    log.note("placement", _placement_name(recipe, colocated), reason)
    precision = choose_precision(recipe, inputs.machine, log)
    size = WEIGHT_BYTES[precision]
    trainer = trainer_on_cpu(recipe, inputs.facts, log)
    for teacher in inputs.teachers:
        check_layout(trainer, teacher)
    if recipe.has_engines:
        why_one = why_not_two_engines(
            recipe, inputs.machine, inputs.facts, size=size, colocated=colocated
        )
        fitted = None if why_one else _fitted_pair(inputs, trainer, size, log)
        if fitted is None:
            why_one = why_one or "two would leave one another too little main memory"
            engines = engines_on_cpu(recipe, inputs.facts, log, why_one=why_one)
            fitted = _fitted(inputs, trainer, engines, size, log, colocated=colocated)
    else:
        fitted = _fitted(inputs, trainer, NO_ENGINES, size, log, colocated=colocated)
    return _assembled(
        inputs,
        log,
        trainer=fitted.trainer,
        engines=fitted.engines if recipe.has_engines else NO_ENGINES,
        colocated=colocated,
        cap=fitted.cap,
        precision=precision,
        pair=None,
        processes=fitted.processes,
    )


def _fitted_pair(
    inputs: _PlanInputs, trainer: TrainerLayout, size: int, log: Log
) -> MemoryFit | None:
    """Return a fit with two engines; None, without log entries, if main memory would give them or
    the trainer less than they ask for."""
    noted = Log()
    engines = engines_on_cpu(inputs.recipe, inputs.facts, noted, why_one=None)
    try:
        fitted = _fitted(inputs, trainer, engines, size, noted, colocated=True)
    except FitError:  # what does not fit with one engine either is said then
        return None
    if (fitted.trainer, fitted.engines) != (trainer, engines):
        return None
    log.decisions += noted.decisions
    return fitted


def _fitted(
    inputs: _PlanInputs,
    trainer: TrainerLayout,
    engines: EngineLayout,
    size: int,
    log: Log,
    *,
    colocated: bool,
) -> MemoryFit:
    return fit_main_memory(
        inputs.recipe,
        inputs.machine,
        inputs.facts,
        trainer=trainer,
        engines=engines,
        slots=assign_slots(trainer, engines, colocated, 0, inputs.recipe.machine.nodes),
        size=size,
        log=log,
        teachers=inputs.teachers,
    )


def _on_devices(inputs: _PlanInputs, log: Log, *, colocated: bool, reason: str) -> Plan:
    recipe = inputs.recipe
    precision = choose_precision(recipe, inputs.machine, placed := Log())
    pair = plan_devices(
        recipe,
        inputs.machine,
        inputs.facts,
        devices_per_node=inputs.per_node,
        colocated=colocated,
        size=WEIGHT_BYTES[precision],
        log=placed,
        teachers=inputs.teachers,
    )
    turns = (
        f"; rollout {format_duration(pair.engines.seconds.total)}, training "
        f"{format_duration(pair.trainer.seconds.total)}"
    )
    log.note(
        "placement",
        _placement_name(recipe, colocated),
        reason + turns if recipe.has_engines else reason,
    )
    log.decisions += placed.decisions
    return _assembled(
        inputs,
        log,
        trainer=pair.trainer.layout,
        engines=engine_context(recipe, inputs.facts, pair).layout
        if recipe.has_engines
        else NO_ENGINES,
        colocated=colocated,
        cap=pair.trainer.cap,
        precision=precision,
        pair=pair,
    )


def _assembled(
    inputs: _PlanInputs,
    log: Log,
    *,
    trainer: TrainerLayout,
    engines: EngineLayout,
    colocated: bool,
    cap: int,
    precision: Literal["bf16", "fp32"],
    pair: TrainerEnginePair | None,
    processes: list[ProcessMemory] | None = None,
) -> Plan:
    recipe, machine = inputs.recipe, inputs.machine
    slots = assign_slots(trainer, engines, colocated, inputs.per_node, recipe.machine.nodes)
    on_cpu = inputs.num_devices == 0
    _require_devices(slots, trainer, engines, inputs, colocated=colocated)
    if not on_cpu:
        note_idle_devices(slots, inputs.num_devices, recipe, log)
    _note_attention(recipe, on_cpu=on_cpu, log=log)
    note_experts(recipe, inputs.facts, trainer, fp32=precision == "fp32", on_cpu=on_cpu, log=log)
    note_speculation(recipe, on_cpu=on_cpu, log=log)
    channel = (
        choose_channel(recipe, slots, colocated=colocated, on_cpu=on_cpu, log=log)
        if engines.num
        else "tensor"
    )
    merges = publishes_merged(recipe, on_cpu=on_cpu, size=WEIGHT_BYTES[precision])
    note_publishing(recipe, merged=merges, log=log)
    memory = memory_of(recipe, inputs.facts, merged=merges)
    note_transfer(recipe, memory, trainer, engines, channel, size=WEIGHT_BYTES[precision], log=log)
    formats = formats_of(recipe, merges_adapter=merges)
    rounds_inputs = note_formats(
        recipe, inputs.facts, formats, (trainer, engines), on_cpu=on_cpu, log=log
    )
    batch = batch_plan(recipe, inputs.facts, trainer, cap, on_cpu=on_cpu, log=log)
    threads, of_engines = _threads(
        recipe, machine, slots, colocated=colocated, on_cpu=on_cpu, log=log
    )
    return Plan(
        device_kind="cpu" if on_cpu else machine.kind,
        collective="gloo" if on_cpu else "nccl",
        precision=precision,
        trainer=trainer,
        engines=replace(engines, cpu_threads=of_engines if of_engines != threads else None),
        colocated=colocated,
        channel=channel,
        slots=slots,
        batch=batch,
        cpu_threads=threads,
        max_staleness=recipe.rollout.max_staleness,
        steps=recipe.train.steps,
        warmup_steps=recipe.warmup.steps,
        on_policy=choose_on_policy(
            recipe,
            inputs.facts,
            trainer=trainer,
            engines=engines,
            formats=formats,
            rounds_inputs=rounds_inputs,
            on_cpu=on_cpu,
            log=log,
        ),
        collectors=choose_collectors(recipe, engines, log),
        engines_apart=recipe.engines_apart,
        trainer_format=formats.trainer,
        quantises_inputs=rounds_inputs,
        engine_format=formats.engines,
        merges_adapter=merges,
        roles=_roles(inputs, WEIGHT_BYTES[precision], log),
        decisions=log.decisions,
        forecast=forecast(pair, machine, steps=recipe.train.steps, num_devices=len(slots))
        if pair
        else None,
        processes=processes or [],
        object_store_bytes=plan_store(recipe, machine, inputs.facts, engines, log),
    )


def _placement_name(recipe: Recipe, colocated: bool) -> str:
    if not recipe.has_engines:
        return "trainer alone"
    return "colocated" if colocated else "split"


def _threads(
    recipe: Recipe,
    machine: Machine,
    slots: Sequence[Slot],
    *,
    colocated: bool,
    on_cpu: bool,
    log: Log,
) -> tuple[int, int]:
    """Return (threads of a trainer rank, threads of an engine rank). If they take turns on a CPU,
    each uses all cores."""
    if pinned := recipe.machine.cpu_threads:
        log.note("cpu_threads", pinned, "pinned by `machine.cpu_threads`")
        return pinned, pinned
    cores, here = machine.nodes[0].cpu_cores, [slot for slot in slots if slot.node == 0]
    ranks = sum(slot.trainer_rank is not None for slot in here)
    shards = sum(slot.engine is not None for slot in here)
    if on_cpu and colocated and shards not in (0, ranks):
        threads, of_engines = (max(1, cores // max(1, count)) for count in (ranks, shards))
        log.note("cpu_threads", threads, f"{cores} cores / {_with_plural(ranks, 'trainer rank')}")
        why = f"{cores} cores / {_with_plural(shards, 'engine rank')}, in turns with the trainer"
        log.note("engines.cpu_threads", of_engines, why)
        return threads, of_engines
    threads = max(1, cores // len(here))
    turns = ", which take turns" if colocated and shards else ""
    log.note("cpu_threads", threads, f"{cores} cores / {_with_plural(len(here), 'slot')}{turns}")
    return threads, threads


def _with_plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s'[: number > 1]}"


def _require_devices(
    slots: Sequence[object],
    trainer: TrainerLayout,
    engines: EngineLayout,
    inputs: _PlanInputs,
    *,
    colocated: bool,
) -> None:
    """Raise FitError if the layouts need more devices than there are."""
    if not inputs.num_devices or len(slots) <= inputs.num_devices:
        return
    raise FitError(
        f"the plan needs {len(slots)} devices, but there are {inputs.num_devices}",
        why=f"trainer {trainer.world_size} + engines {engines.num} x "
        f"{engines.tp}{' on the same devices' if colocated else ''}",
        fix=[
            "--set engines.placement=colocated",
            f"--nodes {-(-len(slots) // inputs.per_node)}",
        ],
    )


def _note_attention(recipe: Recipe, *, on_cpu: bool, log: Log) -> None:
    """Log the attention backend that the recipe pins; nothing if it pins none."""
    backend = recipe.engines.attention_backend
    if backend is not None and on_cpu:
        why = f"the one that computes on a CPU; `{backend}` is for accelerators"
        log.note("engines.attention_backend", "torch_native", why)
    elif backend is not None:
        log.note("engines.attention_backend", backend, "pinned by `engines.attention_backend`")


def _roles(inputs: _PlanInputs, size: int, log: Log) -> list[Role]:
    recipe = inputs.recipe
    roles = roles_of(recipe, log)
    roles += teacher_roles(recipe, inputs.facts, inputs.teachers, size=size, log=log)
    if recipe.uses_reward_model:
        roles.append(Role(name="reward_model", place="first_device"))
    return roles
