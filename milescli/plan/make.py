"""From a wish and a machine to a decision: legal layouts, placement, batch arithmetic, each choice
with its reason. The one door; pure, no torch, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from milescli.core.errors import FitError
from milescli.core.units import format_duration
from milescli.models.facts import ModelFacts
from milescli.plan.decisions import Log
from milescli.plan.forecast import forecast
from milescli.plan.main_memory import fit_main_memory
from milescli.plan.on_cpu import engines_on_cpu, trainer_on_cpu
from milescli.plan.on_devices import Answer, engine_context, plan_devices
from milescli.plan.remedies import with_remedies
from milescli.plan.types import BatchPlan, EngineLayout, Plan, Slot, TrainerLayout
from milescli.platform.machine import Machine
from milescli.recipe.schema import Recipe


def make_plan(recipe: Recipe, machine: Machine, facts: ModelFacts) -> Plan:
    """The plan of this recipe on this machine. Raises FitError with the equation where a pin is
    illegal or does not fit, and with fixes that were tried."""

    def plans(other: Recipe) -> Plan:
        return _planned(other, machine, facts)

    try:
        return plans(recipe)
    except FitError as error:
        raise with_remedies(error, recipe, machine, plans) from None


def try_plan(recipe: Recipe, machine: Machine, facts: ModelFacts) -> Plan | None:
    """None where nothing fits: sooner than `make_plan`, which looks for what would."""
    try:
        return _planned(recipe, machine, facts)
    except FitError:
        return None


def _planned(recipe: Recipe, machine: Machine, facts: ModelFacts) -> Plan:
    """`engines.placement: auto` takes the other placement where the first does not fit."""
    log = Log()
    devices_per_node = _devices_per_node(recipe, machine, log)
    num_devices = devices_per_node * recipe.machine.nodes
    inputs = _PlanInputs(
        recipe=recipe, machine=machine, facts=facts, devices_per_node=devices_per_node
    )
    if num_devices == 0:
        return _on_cpu(inputs, log)
    colocated, reason = _placement(recipe, num_devices)
    try:
        return _on_devices(inputs, log, colocated=colocated, reason=reason)
    except FitError as error:
        if recipe.engines.placement != "auto" or num_devices == 1:
            raise
        told = (
            f"{'sharing devices' if colocated else 'devices of their own'} would not do: "
            f"{error.what}"
        )
        try:
            return _on_devices(
                inputs, Log(decisions=log.decisions[:1]), colocated=not colocated, reason=told
            )
        except FitError:
            raise error from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanInputs:
    """What is planned, and on what."""

    recipe: Recipe
    machine: Machine
    facts: ModelFacts
    devices_per_node: int
    """0: the CPU."""


def _on_cpu(inputs: _PlanInputs, log: Log) -> Plan:
    recipe = inputs.recipe
    colocated, reason = _placement(recipe, None)
    log.note("placement", "colocated" if colocated else "split", reason)
    precision = _precision(recipe, inputs.machine, log)
    trainer, engines = (
        trainer_on_cpu(recipe, inputs.facts, log),
        engines_on_cpu(recipe, inputs.facts, log),
    )
    fitted = fit_main_memory(
        recipe,
        inputs.machine,
        inputs.facts,
        trainer=trainer,
        engines=engines,
        slots=_slots(trainer, engines, colocated, 0, recipe.machine.nodes),
        size={"bf16": 2, "fp32": 4}[precision],
        log=log,
    )
    return _assembled(
        inputs,
        log,
        trainer=fitted.trainer,
        engines=fitted.engines,
        colocated=colocated,
        cap=fitted.cap,
        precision=precision,
        answer=None,
    )


def _on_devices(inputs: _PlanInputs, log: Log, *, colocated: bool, reason: str) -> Plan:
    recipe = inputs.recipe
    precision = _precision(recipe, inputs.machine, placed := Log())
    answer = plan_devices(
        recipe,
        inputs.machine,
        inputs.facts,
        devices_per_node=inputs.devices_per_node,
        colocated=colocated,
        size={"bf16": 2, "fp32": 4}[precision],
        log=placed,
    )
    turns = (
        f"; rollout {format_duration(answer.engines.seconds.total)}, training "
        f"{format_duration(answer.trainer.seconds.total)}"
    )
    log.note("placement", "colocated" if colocated else "split", reason + turns)
    log.decisions += placed.decisions
    return _assembled(
        inputs,
        log,
        trainer=answer.trainer.layout,
        engines=engine_context(recipe, inputs.facts, answer).layout,
        colocated=colocated,
        cap=answer.trainer.cap,
        precision=precision,
        answer=answer,
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
    answer: Answer | None,
) -> Plan:
    recipe, machine = inputs.recipe, inputs.machine
    slots = _slots(trainer, engines, colocated, inputs.devices_per_node, recipe.machine.nodes)
    num_devices = inputs.devices_per_node * recipe.machine.nodes
    if num_devices and len(slots) > num_devices:
        raise FitError(
            f"the plan needs {len(slots)} devices and there are {num_devices}",
            why=f"trainer {trainer.world_size} + engines {engines.num} x "
            f"{engines.tp}{' on the same devices' if colocated else ''}",
            fix=[
                "--set engines.placement=colocated",
                f"--nodes {-(-len(slots) // inputs.devices_per_node)}",
            ],
        )
    if num_devices:
        _note_idle(slots, num_devices, recipe, log)
    return Plan(
        device_kind=machine.kind if num_devices else "cpu",
        collective="nccl" if num_devices else "gloo",
        precision=precision,
        trainer=trainer,
        engines=engines,
        colocated=colocated,
        channel=_channel(recipe, slots, colocated, log),
        slots=slots,
        batch=_batch(recipe, trainer, cap, log),
        cpu_threads=_threads(
            recipe, machine, sum(slot.node == 0 for slot in slots), colocated, log
        ),
        max_staleness=recipe.rollout.max_staleness,
        steps=recipe.train.steps,
        warmup_steps=recipe.warmup.steps,
        old_logprobs=_old_logprobs(recipe, log),
        decisions=log.decisions,
        forecast=forecast(answer, machine, steps=recipe.train.steps, num_devices=len(slots))
        if answer
        else None,
    )


def _note_idle(slots: list[Slot], num_devices: int, recipe: Recipe, log: Log) -> None:
    """Devices on which nobody lives are told, and why."""
    used = sum(slot.trainer_rank is not None or slot.engine is not None for slot in slots)
    if used == num_devices:
        return
    pins = [
        f"{room}.{key}"
        for room, keys in (("parallel", ("tp", "pp", "cp", "dp")), ("engines", ("tp", "num")))
        for key in keys
        if getattr(getattr(recipe, room), key) is not None
    ]
    why = (
        f"pinned: {', '.join(pins)}"
        if pins
        else "no legal layout of trainer and engines takes them all, or none that fits"
    )
    log.note("idle devices", num_devices - used, why)


def _devices_per_node(recipe: Recipe, machine: Machine, log: Log) -> int:
    """0 means: the CPU."""
    wanted = recipe.machine.gpus
    visible = 0 if machine.kind == "cpu" else min(len(node.devices) for node in machine.nodes)
    if wanted == 0 or (wanted is None and visible == 0):
        log.note("device", "cpu", "`machine.gpus` is 0" if wanted == 0 else "no GPU is visible")
        return 0
    if wanted is None:
        log.note("device", f"{visible} x {machine.kind}", "all that are visible")
        return visible
    if wanted > visible:
        raise FitError(
            f"{wanted} GPUs per node are wanted and {visible} are visible",
            why=f"this machine is of the kind {machine.kind}"
            + ("" if visible else " and has no GPU that miles can see"),
            fix=[
                f"--gpus {visible}" if visible else "leave --gpus out to run on the CPU",
                "miles doctor",
            ],
        )
    log.note("device", f"{wanted} x {machine.kind}", "pinned by `machine.gpus`")
    return wanted


def _placement(recipe: Recipe, num_devices: int | None) -> tuple[bool, str]:
    """(colocated, why)"""
    wanted, staleness = recipe.engines.placement, recipe.rollout.max_staleness
    if wanted != "auto":
        return wanted == "colocated", "pinned by `engines.placement`"
    if staleness > 0 and (num_devices is None or num_devices > 1):
        return False, f"max_staleness {staleness}: rollout runs while the trainer works"
    return True, "strictly on-policy steps take turns, so each gets all devices"


def _slots(
    trainer: TrainerLayout,
    engines: EngineLayout,
    colocated: bool,
    devices_per_node: int,
    num_nodes: int,
) -> list[Slot]:
    """Slot i: trainer rank i; engine ranks on the same slots (colocated) or behind the trainer's
    (split), where an engine can begin without lying across two nodes. On a CPU a node has as many
    slots as it takes to use all nodes. Raises FitError where these have not one each."""
    ranks, shards = trainer.world_size, engines.num * engines.tp
    unit = min(engines.tp, devices_per_node) if devices_per_node else 1
    offset = 0 if colocated else -(-ranks // unit) * unit
    num_slots = max(ranks, offset + shards)
    if not devices_per_node and num_slots < num_nodes:
        raise FitError(
            f"{num_nodes} nodes are wanted, and the plan has {num_slots} "
            f"slot{'s'[: num_slots > 1]} for them",
            why=f"trainer ranks {ranks}, engine ranks "
            f"{shards}{', which share slots' if colocated else ''}: each node needs one at "
            "least",
            fix=[f"--nodes {num_slots}", f"--set parallel.dp={num_nodes}"],
        )
    per_node = devices_per_node or -(-num_slots // num_nodes)
    slots = []
    for index in range(num_slots):
        shard = index - offset
        lives = 0 <= shard < shards
        slots.append(
            Slot(
                node=index // per_node,
                device=index % per_node,
                trainer_rank=index if index < ranks else None,
                engine=shard // engines.tp if lives else None,
                engine_rank=shard % engines.tp if lives else None,
            )
        )
    return slots


def _precision(recipe: Recipe, machine: Machine, log: Log) -> Literal["bf16", "fp32"]:
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


def _channel(
    recipe: Recipe, slots: list[Slot], colocated: bool, log: Log
) -> Literal["tensor", "distributed"]:
    with_trainer = {slot.node for slot in slots if slot.trainer_rank is not None}
    alone = sorted({slot.node for slot in slots if slot.engine is not None} - with_trainer)
    if alone and recipe.weights.channel == "tensor":
        raise FitError(
            "weights cannot be handed over in shared memory",
            why=f"engines on node {', '.join(map(str, alone))} have no trainer rank beside them",
            fix=["--set weights.channel=distributed", "--set engines.placement=colocated"],
        )
    if recipe.weights.channel != "auto":
        log.note("weights.channel", recipe.weights.channel, "pinned by `weights.channel`")
        return recipe.weights.channel
    if colocated and alone:
        log.note(
            "weights.channel",
            "distributed",
            f"engines on node {', '.join(map(str, alone))} have no trainer rank beside them",
        )
        return "distributed"
    if colocated:
        log.note(
            "weights.channel",
            "tensor",
            "trainer and engines share devices: buckets are handed over in shared memory",
        )
        return "tensor"
    log.note(
        "weights.channel",
        "distributed",
        "trainer and engines have devices of their own: buckets are broadcast",
    )
    return "distributed"


def _batch(recipe: Recipe, trainer: TrainerLayout, cap: int, log: Log) -> BatchPlan:
    prompts, group = recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt
    longest = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    num_samples, updates = prompts * group, recipe.train.updates_per_step
    if longest > cap * trainer.cp:
        raise FitError(
            f"a sequence of {longest} tokens does not fit into a microbatch",
            why=f"data.max_prompt_tokens {recipe.data.max_prompt_tokens} + "
            f"rollout.max_response_tokens {recipe.rollout.max_response_tokens} = {longest}"
            f" > train.max_tokens_per_microbatch {cap} x cp {trainer.cp}",
            fix=f"--set train.max_tokens_per_microbatch={-(-longest // trainer.cp)}",
        )
    if num_samples < trainer.dp * updates:
        raise FitError(
            f"{num_samples} samples a step are too few for {trainer.dp} data-parallel ranks x "
            f"{updates} updates",
            why=f"prompts_per_step {prompts} x samples_per_prompt {group} = {num_samples} < "
            f"{trainer.dp * updates}",
            fix=f"--set rollout.prompts_per_step={-(-trainer.dp * updates // group)}",
        )
    log.note(
        "batch",
        f"{num_samples} samples",
        f"{prompts} prompts x {group}; at most {cap} tokens a microbatch and rank",
    )
    return BatchPlan(
        prompts_per_step=prompts,
        samples_per_prompt=group,
        num_samples=num_samples,
        updates_per_step=updates,
        max_tokens_per_microbatch=cap,
        max_sequence_tokens=longest,
    )


def _threads(recipe: Recipe, machine: Machine, num_slots: int, colocated: bool, log: Log) -> int:
    if recipe.machine.cpu_threads:
        log.note("cpu_threads", recipe.machine.cpu_threads, "pinned by `machine.cpu_threads`")
        return recipe.machine.cpu_threads
    cores = machine.nodes[0].cpu_cores
    threads = max(1, cores // num_slots)
    log.note(
        "cpu_threads",
        threads,
        f"{cores} cores / {num_slots} slot{'s'[: num_slots > 1]}"
        + (", which take turns" if colocated else ""),
    )
    return threads


def _old_logprobs(recipe: Recipe, log: Log) -> Literal["trainer", "engine"]:
    wanted = recipe.train.old_logprobs
    if wanted != "auto":
        log.note("old_logprobs", wanted, "pinned by `train.old_logprobs`")
        return wanted
    if recipe.rollout.max_staleness:
        log.note(
            "old_logprobs",
            "engine",
            "stale answers came from older weights, and only the engine knows their log-probs",
        )
        return "engine"
    log.note(
        "old_logprobs",
        "trainer",
        "on-policy: the trainer's own log-probs do not depend on how the engine batched",
    )
    return "trainer"
