"""From a wish and a machine to a decision: legal layouts, placement, batch arithmetic, each choice with its reason. Pure; no torch, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from milescli.core.errors import FitError
from milescli.models.facts import ModelFacts
from milescli.plan.types import BatchPlan, Decision, EngineLayout, Plan, Slot, TrainerLayout
from milescli.platform.machine import Machine
from milescli.recipe.schema import Recipe

CPU_KV_SLOTS_PER_REQUEST = 1.25
"""Head room of the KV cache of an engine on a CPU over what the largest step can hold at once."""


@dataclass(slots=True)
class _Log:
    decisions: list[Decision] = field(default_factory=list)

    def note(self, key: str, value: object, reason: str) -> None:
        self.decisions.append(
            Decision(key=key, value=str(value).lower() if isinstance(value, bool) else str(value), reason=reason)
        )


def make_plan(recipe: Recipe, machine: Machine, facts: ModelFacts) -> Plan:
    """The plan of this recipe on this machine. Raises FitError with the equation where a pin is illegal or does not fit."""
    log = _Log()
    devices_per_node = _devices_per_node(recipe, machine, log)
    num_devices = devices_per_node * recipe.machine.nodes if devices_per_node else None
    colocated = _placement(recipe, num_devices, log)
    engines_tp = recipe.engines.tp or 1
    trainer_share = _trainer_devices(recipe, num_devices, colocated, log)
    trainer = _trainer_layout(recipe, facts, trainer_share, log)
    engines = _engine_layout(recipe, facts, trainer, num_devices, colocated, engines_tp, log)
    slots = _slots(trainer, engines, colocated, devices_per_node)
    if num_devices is not None and len(slots) > num_devices:
        raise FitError(
            f"the plan needs {len(slots)} devices and there are {num_devices}",
            why=f"trainer {trainer.world_size} + engines {engines.num} x {engines.tp}{' on the same devices' if colocated else ''}",
            fix=["--set engines.placement=colocated", f"--gpus {-(-len(slots) // recipe.machine.nodes)}"],
        )
    precision = _precision(recipe, machine, log)
    staleness = recipe.rollout.max_staleness
    return Plan(
        device_kind=machine.kind if devices_per_node else "cpu",
        collective="nccl" if devices_per_node else "gloo",
        precision=precision,
        trainer=trainer,
        engines=engines,
        colocated=colocated,
        channel=_channel(recipe, colocated, log),
        slots=slots,
        batch=_batch(recipe, trainer, log),
        cpu_threads=_threads(recipe, machine, len(slots), colocated, log),
        max_staleness=staleness,
        steps=recipe.train.steps,
        warmup_steps=recipe.warmup.steps,
        old_logprobs=_old_logprobs(recipe, log),
        decisions=log.decisions,
    )


def _devices_per_node(recipe: Recipe, machine: Machine, log: _Log) -> int:
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
            why=f"this machine is of the kind {machine.kind}" + ("" if visible else " and has no GPU that miles can see"),
            fix=[f"--gpus {visible}" if visible else "leave --gpus out to run on the CPU", "miles doctor"],
        )
    log.note("device", f"{wanted} x {machine.kind}", "pinned by `machine.gpus`")
    return wanted


def _placement(recipe: Recipe, num_devices: int | None, log: _Log) -> bool:
    wanted, staleness = recipe.engines.placement, recipe.rollout.max_staleness
    if wanted != "auto":
        log.note("placement", wanted, "pinned by `engines.placement`")
        return wanted == "colocated"
    if staleness > 0 and (num_devices is None or num_devices > 1):
        log.note("placement", "split", f"max_staleness {staleness}: rollout runs while the trainer works")
        return False
    log.note("placement", "colocated", "strictly on-policy steps take turns, so each gets all devices")
    return True


def _trainer_devices(recipe: Recipe, num_devices: int | None, colocated: bool, log: _Log) -> int:
    pins = recipe.parallel
    model_ranks = (pins.tp or 1) * (pins.pp or 1) * (pins.cp or 1)
    if num_devices is None:
        ep_ranks = -(-((pins.ep or 1) * (pins.etp or pins.tp or 1)) // ((pins.tp or 1) * (pins.cp or 1)))
        return model_ranks * (pins.dp or max(1, ep_ranks))
    if colocated:
        return num_devices
    engines = (recipe.engines.num or max(1, num_devices // 2 // (recipe.engines.tp or 1))) * (recipe.engines.tp or 1)
    share = num_devices - engines
    if share < model_ranks:
        raise FitError(
            f"split placement leaves {share} devices for the trainer, which needs {model_ranks}",
            why=f"{num_devices} devices - {engines} for engines = {share}; tp x pp x cp = {model_ranks}",
            fix=["--set engines.placement=colocated", f"--set engines.num={max(1, (num_devices - model_ranks))}"],
        )
    log.note("trainer devices", share, f"{num_devices} devices less {engines} for the engines")
    return share


def _trainer_layout(recipe: Recipe, facts: ModelFacts, num_ranks: int, log: _Log) -> TrainerLayout:
    pins = recipe.parallel
    tp, pp, cp = pins.tp or 1, pins.pp or 1, pins.cp or 1
    ep = pins.ep or 1
    etp = pins.etp or (tp if ep == 1 else 1)
    if not facts.num_experts:
        etp = tp if pins.etp is None else etp
    dp = pins.dp or max(1, num_ranks // (tp * pp * cp))
    sequence_parallel = pins.sequence_parallel if pins.sequence_parallel is not None else tp > 1
    _check_divides("parallel.tp", tp, facts.num_heads, "attention heads")
    num_kv_heads = facts.common_kv_heads
    if tp <= num_kv_heads:
        _check_divides("parallel.tp", tp, num_kv_heads, "key/value heads")
    else:
        _refuse("parallel.tp", tp, f"it exceeds the model's {num_kv_heads} key/value heads", num_kv_heads)
    if pp > facts.num_layers:
        _refuse("parallel.pp", pp, f"the model has {facts.num_layers} layers, and each stage needs one", facts.num_layers)
    _check_experts(facts, tp=tp, cp=cp, dp=dp, ep=ep, etp=etp)
    if pins.dp is None and num_ranks % (tp * pp * cp):
        raise FitError(
            f"tp x pp x cp = {tp} x {pp} x {cp} = {tp * pp * cp} does not divide {num_ranks} devices",
            why=f"{num_ranks} / {tp * pp * cp} is not whole, so ranks would be left over",
            fix="pin a layout that divides, or `--set parallel.dp="
            + str(max(1, num_ranks // (tp * pp * cp)))
            + "` to leave devices idle",
        )
    for key, value in (("tp", tp), ("pp", pp), ("cp", cp), ("ep", ep)):
        pinned = getattr(pins, key) is not None
        log.note(f"trainer.{key}", value, f"pinned by `parallel.{key}`" if pinned else "1 unless pinned")
    log.note("trainer.dp", dp, f"{tp * pp * cp * dp} ranks / (tp {tp} x pp {pp} x cp {cp})")
    if sequence_parallel:
        log.note(
            "trainer.sequence_parallel", True, "tp > 1: norms and residuals are split along the sequence, which saves memory"
        )
    return TrainerLayout(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        sequence_parallel=sequence_parallel and tp > 1,
        recompute=recipe.train.recompute,
    )


def _check_experts(facts: ModelFacts, *, tp: int, cp: int, dp: int, ep: int, etp: int) -> None:
    if ep == 1 and not facts.num_experts:
        return
    if not facts.num_experts:
        _refuse("parallel.ep", ep, "the model is dense: it has no experts", 1)
    _check_divides("parallel.ep", ep, facts.num_experts, "experts")
    if ep == 1 and etp != tp:
        # Megatron-Core 0.16.1 takes such experts for dense layers and does not sum what tp ranks with other tokens learned
        _refuse("parallel.etp", etp, f"with ep 1, Megatron sums the experts' gradients rightly only where etp is tp, {tp}", tp)
    if (tp * cp * dp) % (ep * etp):
        raise FitError(
            f"expert layout ep {ep} x etp {etp} does not divide the ranks of one pipeline stage",
            why=f"tp {tp} x cp {cp} x dp {dp} = {tp * cp * dp} is not a multiple of {ep * etp}",
            fix=f"--set parallel.dp={max(1, ep * etp // (tp * cp))}",
        )


def _check_divides(key: str, value: int, total: int, what: str) -> None:
    if total % value:
        legal = [d for d in range(1, value + 1) if total % d == 0][-1]
        _refuse(key, value, f"{total} {what} / {value} is not whole", legal)


def _refuse(key: str, value: int, why: str, legal: int) -> None:
    raise FitError(f"`{key}={value}` is illegal for this model", why=why, fix=f"--set {key}={legal}")


def _engine_layout(
    recipe: Recipe, facts: ModelFacts, trainer: TrainerLayout, num_devices: int | None, colocated: bool, tp: int, log: _Log
) -> EngineLayout:
    _check_divides("engines.tp", tp, facts.num_heads, "attention heads")
    if num_devices is None:
        num = recipe.engines.num or 1
        reason = (
            "pinned by `engines.num`" if recipe.engines.num else "engines on a CPU share its cores: more of them win nothing"
        )
    else:
        room = num_devices if colocated else num_devices - trainer.world_size
        num = recipe.engines.num or max(1, room // tp)
        reason = "pinned by `engines.num`" if recipe.engines.num else f"{room} devices / tp {tp}"
    log.note("engines.num", num, reason)
    num_samples = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
    running = recipe.engines.max_running_requests or max(8, min(512, -(-num_samples // num)))
    log.note(
        "engines.max_running_requests",
        running,
        "pinned"
        if recipe.engines.max_running_requests
        else f"{num_samples} samples a step over {num} engine{'s'[: num > 1]}, at most 512",
    )
    longest = recipe.data.max_prompt_tokens + max(recipe.rollout.max_response_tokens, recipe.eval.max_response_tokens or 0)
    slots = recipe.engines.max_total_tokens
    if slots is None and num_devices is None:
        slots = max(4096, int(running * longest * CPU_KV_SLOTS_PER_REQUEST))
        log.note("engines.max_total_tokens", slots, f"{running} requests x {longest} tokens and a quarter more")
    return EngineLayout(
        num=num,
        tp=tp,
        max_running_requests=running,
        max_total_tokens=slots,
        memory_fraction=recipe.engines.memory_fraction,
        context_length=min(facts.max_position_embeddings, longest + 16) if facts.max_position_embeddings else longest + 16,
    )


def _slots(trainer: TrainerLayout, engines: EngineLayout, colocated: bool, devices_per_node: int) -> list[Slot]:
    """Slot i: trainer rank i; engine ranks on the same slots (colocated) or behind the trainer's (split)."""
    ranks, shards = trainer.world_size, engines.num * engines.tp
    offset = 0 if colocated else ranks
    slots = []
    for index in range(max(ranks, offset + shards)):
        shard = index - offset
        lives = 0 <= shard < shards
        slots.append(
            Slot(
                node=index // devices_per_node if devices_per_node else 0,
                device=index % devices_per_node if devices_per_node else index,
                trainer_rank=index if index < ranks else None,
                engine=shard // engines.tp if lives else None,
                engine_rank=shard % engines.tp if lives else None,
            )
        )
    return slots


def _precision(recipe: Recipe, machine: Machine, log: _Log) -> Literal["bf16", "fp32"]:
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


def _channel(recipe: Recipe, colocated: bool, log: _Log) -> Literal["tensor", "distributed"]:
    if recipe.weights.channel != "auto":
        log.note("weights.channel", recipe.weights.channel, "pinned by `weights.channel`")
        return recipe.weights.channel
    if colocated:
        log.note("weights.channel", "tensor", "trainer and engines share devices: buckets are handed over in shared memory")
        return "tensor"
    log.note("weights.channel", "distributed", "trainer and engines have devices of their own: buckets are broadcast")
    return "distributed"


def _batch(recipe: Recipe, trainer: TrainerLayout, log: _Log) -> BatchPlan:
    prompts, group = recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt
    longest = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    cap = recipe.train.max_tokens_per_microbatch
    num_samples, updates = prompts * group, recipe.train.updates_per_step
    if longest > cap * trainer.cp:
        raise FitError(
            f"a sequence of {longest} tokens does not fit into a microbatch",
            why=f"data.max_prompt_tokens {recipe.data.max_prompt_tokens} + rollout.max_response_tokens {recipe.rollout.max_response_tokens} = {longest}"
            f" > train.max_tokens_per_microbatch {cap} x cp {trainer.cp}",
            fix=f"--set train.max_tokens_per_microbatch={longest}",
        )
    if num_samples < trainer.dp * updates:
        raise FitError(
            f"{num_samples} samples a step are too few for {trainer.dp} data-parallel ranks x {updates} updates",
            why=f"prompts_per_step {prompts} x samples_per_prompt {group} = {num_samples} < {trainer.dp * updates}",
            fix=f"--set rollout.prompts_per_step={-(-trainer.dp * updates // group)}",
        )
    log.note("batch", f"{num_samples} samples", f"{prompts} prompts x {group}; at most {cap} tokens a microbatch")
    return BatchPlan(
        prompts_per_step=prompts,
        samples_per_prompt=group,
        num_samples=num_samples,
        updates_per_step=updates,
        max_tokens_per_microbatch=cap,
        max_sequence_tokens=longest,
    )


def _threads(recipe: Recipe, machine: Machine, num_slots: int, colocated: bool, log: _Log) -> int:
    if recipe.machine.cpu_threads:
        log.note("cpu_threads", recipe.machine.cpu_threads, "pinned by `machine.cpu_threads`")
        return recipe.machine.cpu_threads
    cores = machine.nodes[0].cpu_cores
    threads = max(1, cores // num_slots)
    log.note(
        "cpu_threads",
        threads,
        f"{cores} cores / {num_slots} slot{'s'[: num_slots > 1]}" + (", which take turns" if colocated else ""),
    )
    return threads


def _old_logprobs(recipe: Recipe, log: _Log) -> Literal["trainer", "engine"]:
    wanted = recipe.train.old_logprobs
    if wanted != "auto":
        log.note("old_logprobs", wanted, "pinned by `train.old_logprobs`")
        return wanted
    if recipe.rollout.max_staleness:
        log.note("old_logprobs", "engine", "stale answers came from older weights, and only the engine knows their log-probs")
        return "engine"
    log.note("old_logprobs", "trainer", "on-policy: the trainer's own log-probs do not depend on how the engine batched")
    return "trainer"
