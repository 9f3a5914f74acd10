"""Main memory of computers without accelerators: trainer ranks and engines stand in it side by
side, as nothing sleeps there. Refuses what does not fit, and gives the engines' caches what is
left. Pure; called by `make`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product, takewhile

from milescli.core.errors import FitError
from milescli.core.units import GIB, MIB, format_bytes
from milescli.models.facts import ModelFacts
from milescli.plan.activations import Packing
from milescli.plan.adapters import memory_of
from milescli.plan.copies import note_copies
from milescli.plan.decisions import Log
from milescli.plan.memory import (
    MemoryModel,
    TrainerBytes,
    TrainerLoad,
    bucket_bytes,
)
from milescli.plan.on_cpu import longest_tokens
from milescli.plan.types import EngineLayout, Slot, TrainerLayout
from milescli.platform.machine import Machine
from milescli.recipe.schema import Recipe

RANK_PROCESS = 400 * MIB
"""Of a trainer rank without its model: Python, torch, Megatron-Core. Seen of the quickstart's; as
are the next two."""
ENGINE_PROCESS = 2112 * MIB
"""Of an engine rank without its model, with its actor's, the server's and the detokenizer's
processes; 512 MiB of it are the rows in which it keeps running contexts, at most."""
SESSION = 1200 * MIB
"""Driver, router and Ray's own processes on one node."""
USABLE = 0.95
"""Of main memory: the system needs the rest."""
LARGEST_CAP = 8192
"""Tokens of a microbatch that is not pinned, where sequences are no longer: larger ones gain
nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What was left open, decided."""

    trainer: TrainerLayout
    engines: EngineLayout
    cap: int
    """Tokens of a microbatch on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeLoad:
    """What one computer holds, the engines' caches aside."""

    ranks: TrainerBytes
    """Of all trainer ranks on it; `workspace` without what a device's driver takes, `host` what
    else they keep."""
    num_ranks: int
    engine_weights: int
    num_shards: int
    """Engine ranks on it."""

    @property
    def trainer_bytes(self) -> int:
        return self.ranks.total + self.ranks.host

    @property
    def processes(self) -> int:
        return SESSION + self.num_ranks * RANK_PROCESS + self.num_shards * ENGINE_PROCESS

    @property
    def total(self) -> int:
        return self.trainer_bytes + self.engine_weights + self.processes


def fit_main_memory(
    recipe: Recipe,
    machine: Machine,
    facts: ModelFacts,
    *,
    trainer: TrainerLayout,
    engines: EngineLayout,
    slots: Sequence[Slot],
    size: int,
    log: Log,
    teachers: Sequence[ModelFacts] = (),
) -> Fitted:
    """Microbatches as large as there is room for, recompute where smaller ones are not enough, and
    caches of what is left. `size`: bytes of a weight.

    Raises FitError with the sum where the fullest node is too small.
    """
    memory = memory_of(recipe, facts)
    budget = int(USABLE * machine.nodes[0].memory_bytes)
    least = (
        memory.cache_bytes(engines, size=size, tokens=longest_tokens(recipe), sequences=1)
        if engines.num
        else 0
    )
    asked = [trainer]
    if recipe.train.recompute == "auto":
        asked.append(replace(trainer, recompute="full"))
    for layout, cap in product(asked, _caps(recipe, trainer)):
        load = _load(recipe, layout, cap=cap, size=size, teachers=teachers)
        node = _fullest(memory, load, layout, engines, slots)
        if node.total + node.num_shards * least <= budget:
            break
    else:
        raise _refusal(recipe, machine, node, least, budget)
    log.note("trainer.recompute", layout.recompute, _why_recompute(recipe, layout))
    if not engines.num:
        _note_memory(recipe, node, 0, machine, log)
        return Fitted(trainer=layout, engines=engines, cap=cap)
    tokens = _cache_tokens(
        recipe,
        memory,
        engines,
        room=budget - node.total,
        num_shards=node.num_shards,
        size=size,
        log=log,
    )
    cache = node.num_shards * memory.cache_bytes(
        engines, size=size, tokens=tokens, sequences=engines.max_running_requests
    )
    _note_memory(recipe, node, cache, machine, log)
    return Fitted(trainer=layout, engines=replace(engines, max_total_tokens=tokens), cap=cap)


def _note_memory(recipe: Recipe, node: _NodeLoad, cache: int, machine: Machine, log: Log) -> None:
    log.note(
        "memory",
        f"{(node.total + cache) / GIB:.1f} GiB",
        f"{_sum(node, cache)}, of {_there(machine)}; an estimate",
    )
    note_copies(recipe, size_bytes=node.ranks.copies, log=log)


def _caps(recipe: Recipe, trainer: TrainerLayout) -> list[int]:
    """The pinned one; else halves of the largest that is worth it, down to the longest sequence."""
    if recipe.train.max_tokens_per_microbatch:
        return [recipe.train.max_tokens_per_microbatch]
    longest = recipe.longest_sequence * recipe.sequences_per_row
    least = -(-longest // trainer.cp)
    halves = takewhile(
        lambda cap: cap > least,
        (LARGEST_CAP >> number for number in range(LARGEST_CAP.bit_length())),
    )
    return [*halves, least]


def _load(
    recipe: Recipe,
    trainer: TrainerLayout,
    *,
    cap: int,
    size: int,
    teachers: Sequence[ModelFacts],
) -> TrainerLoad:
    tokens = recipe.sequences_per_step * recipe.longest_sequence
    most = -(-tokens // (trainer.dp * trainer.cp))
    return TrainerLoad(
        size=size,
        row_tokens=min(cap, most),
        num_microbatches=trainer.pp,
        keeps_reference=recipe.keeps_reference,
        critic="beside" if recipe.has_critic else "none",
        teachers=tuple(teachers),
        teachers_beside=True,
        takes_copies=recipe.fault.copy_every > 0,
        sleeps=False,
        bucket_bytes=bucket_bytes(recipe.weights.bucket_mib),
        packing=Packing(imbalance=recipe.train.expert_imbalance),
        on_host=True,
        fused_swiglu=size == 4,
    )


def _fullest(
    memory: MemoryModel,
    load: TrainerLoad,
    trainer: TrainerLayout,
    engines: EngineLayout,
    slots: Sequence[Slot],
) -> _NodeLoad:
    """Of the nodes that the slots are on."""
    stages = memory.stages(trainer, load)
    weights = memory.engine_weights(engines, size=load.size)
    ranks = Counter(
        (slot.node, slot.trainer_rank * trainer.pp // trainer.world_size)
        for slot in slots
        if slot.trainer_rank is not None
    )
    shards = Counter(slot.node for slot in slots if slot.engine is not None)

    def held(number: int) -> _NodeLoad:
        here = [(stages[stage], count) for (node, stage), count in ranks.items() if node == number]
        parts = [each.name for each in fields(TrainerBytes) if each.name != "turn"]
        sums = {part: sum(count * getattr(stage, part) for stage, count in here) for part in parts}
        num_ranks = sum(count for _, count in here)
        sums["workspace"] -= num_ranks * load.reached.trainer_context
        return _NodeLoad(
            ranks=TrainerBytes(**sums),
            num_ranks=num_ranks,
            engine_weights=shards[number] * weights,
            num_shards=shards[number],
        )

    return max(
        (held(number) for number in sorted({slot.node for slot in slots})),
        key=lambda node: node.total,
    )


def _cache_tokens(
    recipe: Recipe,
    memory: MemoryModel,
    engines: EngineLayout,
    *,
    room: int,
    num_shards: int,
    size: int,
    log: Log,
) -> int:
    """Of one engine: what a step can ask for at once, or what `room` bytes are enough for."""
    wanted, running = engines.max_total_tokens, engines.max_running_requests
    assert wanted is not None, "an engine on a CPU has no other measure for its cache"
    states = num_shards * memory.cache_bytes(engines, size=size, tokens=0, sequences=running)
    per_token = max(
        1, num_shards * memory.cache_bytes(engines, size=size, tokens=1 << 20, sequences=0)
    )
    most = (
        max(longest_tokens(recipe), int(max(0, room - states) / per_token * (1 << 20)))
        if num_shards
        else wanted
    )
    if recipe.engines.max_total_tokens:
        reason = "pinned by `engines.max_total_tokens`"
    elif most < wanted:
        wanted, reason = most, "what main memory leaves; requests beyond it wait"
    else:
        reason = f"{running} requests x {longest_tokens(recipe)} tokens and a quarter more"
    log.note("engines.max_total_tokens", wanted, reason)
    return wanted


def _why_recompute(recipe: Recipe, trainer: TrainerLayout) -> str:
    if recipe.train.recompute != "auto":
        return "pinned by `train.recompute`"
    if trainer.recompute == "full":
        return "activations would not fit: the backward pass computes each layer once more"
    return "activations fit"


def _refusal(
    recipe: Recipe, machine: Machine, node: _NodeLoad, least: int, budget: int
) -> FitError:
    total = node.total + node.num_shards * least
    return FitError(
        f"recipe `{recipe.name}` does not fit into the main memory of a CPU with {_there(machine)}",
        why=f"{_sum(node, node.num_shards * least)} = {total / GIB:.1f} GiB > {budget / GIB:.1f} "
        f"({USABLE:.0%} of {_there(machine)}); "
        f"the cache is for one sequence of {longest_tokens(recipe):,} tokens",
        fix=["--set fault.copy_every=0"] if node.ranks.copies else [],
    )


def _sum(node: _NodeLoad, cache: int) -> str:
    ranks = node.ranks
    parts = {
        "weights": ranks.weights,
        "gradients": ranks.gradients,
        "optimizer": ranks.optimizer,
        "activations": ranks.activations + ranks.logits + ranks.workspace,
        "other models": ranks.host - ranks.copies,
        "copies": ranks.copies,
    }
    trainer = " + ".join(
        f"{name} {_gib(size)}"
        for name, size in parts.items()
        if size or name not in ("other models", "copies")
    )
    engines = (
        f"{node.num_shards} engine rank{'s'[: node.num_shards > 1]}: "
        f"weights {_gib(node.engine_weights)} + cache {_gib(cache)}; "
    )
    return (
        f"{node.num_ranks} trainer rank{'s'[: node.num_ranks > 1]}: {trainer}; "
        f"{engines if node.num_shards else ''}processes {node.processes / GIB:.1f}"
    )


def _gib(size: int) -> str:
    """'1.3' GiB; what would be 0.0 says its own unit: '7.3 MiB'."""
    told = f"{size / GIB:.1f}"
    return format_bytes(size) if told == "0.0" and size else told


def _there(machine: Machine) -> str:
    return f"{machine.nodes[0].memory_bytes / GIB:.0f} GiB"
