"""Plans main memory on computers without accelerators, where trainer ranks and engines are in
memory at the same time, as nothing sleeps. Refuses what does not fit, and gives the remaining
memory to the engines' caches. Pure; called by `make`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product, takewhile
from typing import get_args

from milescli.core.errors import FitError, MemoryTaken
from milescli.core.units import GIB, MIB, format_bytes
from milescli.models.facts import ModelFacts
from milescli.plan.activations import Packing
from milescli.plan.choices import shares_prompts
from milescli.plan.collectors import choose_collectors, collecting_bytes
from milescli.plan.devices import Efficiency
from milescli.plan.memory import (
    MemoryModel,
    TrainerBytes,
    TrainerLoad,
    bucket_bytes,
    memory_of,
    publishes_merged,
)
from milescli.plan.on_cpu import PREFILL_TOKENS, longest_tokens
from milescli.plan.static_memory import STATE_COPIES, note_copies, recipe_load_fields
from milescli.plan.transport import sent_copies, store_bytes
from milescli.plan.types import EngineLayout, Log, Phase, ProcessMemory, Slot, TrainerLayout
from milescli.platform.machine import Machine
from milescli.recipe.schema import Recipe, Weights

RANK_PROCESS = 650 * MIB
"""Main memory of a trainer rank without its model: Python, torch, Megatron-Core, and what allocator
and kernels retain after training. Measured with the quickstart's model and SmolLM2-135M, as are the
next two; a page that several processes share counts in part for each."""
ENGINE_PROCESS = 430 * MIB
"""Main memory of an engine rank without its model, including its actor, the server's and the
detokenizer's processes."""
ENGINE_KERNELS = 350 * MIB
"""Main memory that an engine rank adds after long sampling: kernels for as many numbers of requests
and tokens as its caches hold."""
SESSION_BYTES = 950 * MIB
"""Main memory of the driver, Ray's own processes on one node, and the process from which engines
are forked."""
HEAP_SHARE = 0.1
"""Share of activations that the allocator retains between rows of different lengths."""
PHASES: dict[Phase, str] = {
    "start": "before the first step",
    "step": "training",
    "publish": "publishing after a step",
}


def rank_memory(
    name: str, node: int, rank: TrainerBytes, *, widest: int, sent: int
) -> ProcessMemory:
    """Estimate the main memory of a trainer rank. `widest`: bytes of the gradient of the largest
    weight (the embedding of a large vocabulary), which briefly exists twice; `sent`: bytes of
    weights in transit. Building a model needs its weights twice, before gradients and optimizer
    exist."""
    base = RANK_PROCESS + rank.host - _peer_copies_bytes(rank.copies)
    step = base + rank.total + int(HEAP_SHARE * rank.activations) + 2 * widest
    built = base + 2 * rank.weights + rank.gradients
    return ProcessMemory(
        name=name,
        node=node,
        phases={
            "start": max(base + rank.static + sent, built),
            "step": step,
            "publish": step + sent,
        },
        shared_bytes=sent,
    )


def engine_memory(
    name: str,
    node: int,
    num_ranks: int,
    *,
    weights: int,
    compared: int,
    used: int,
    sent: int,
    kept_bytes: int,
    verifies: bool,
) -> ProcessMemory:
    """Estimate the main memory of an engine. `compared`: bytes of the copy with which the first
    publication is compared, and with `verifies` each one; `used`: from `engine_workspace`; `sent`:
    bytes of one bucket of weights; `kept_bytes`: bytes of the weights that it received last, if
    only their changes are sent, and of the memory into which it reads over RDMA or from a store.
    Loading maps a file of half as many bytes as the weights."""
    base = ENGINE_PROCESS + weights + kept_bytes
    trained = base + ENGINE_KERNELS
    return ProcessMemory(
        name=name,
        node=node,
        phases={
            "start": num_ranks * (base + max(compared + sent, used, weights // 2)),
            "step": num_ranks * (trained + used),
            "publish": num_ranks * (trained + max(used, verifies * compared) + sent),
        },
        shared_bytes=num_ranks * sent,
    )


def engine_workspace(facts: ModelFacts, engines: EngineLayout, *, size: int) -> int:
    """Return the bytes that one engine rank needs beside weights and cache: the widest tensors of a
    prefill, and float32 logits of the running requests, with copies for sampling."""
    tokens = min(PREFILL_TOKENS, engines.max_running_requests * engines.context_length)
    wide = max(facts.ffn_hidden_size, facts.topk * facts.moe_ffn_hidden_size) / engines.tp
    prefill = tokens * size * (6 * facts.hidden_size + 3 * wide)
    return int(prefill + 3 * 4 * engines.max_running_requests * facts.vocab_size)


def shared_processes_memory(
    node: int, *, copies: int, stored: int, collecting: int
) -> ProcessMemory:
    """Estimate the main memory of driver and Ray, and of the process that holds copies of
    all ranks' states (`copies` bytes, including those beside the ranks). `stored`: bytes of a
    step's samples in Ray's object store, which retains the pages that it used. `collecting`: bytes
    of the node's collecting processes."""
    base = SESSION_BYTES + _peer_copies_bytes(copies) + collecting
    phases: dict[Phase, int] = {"start": base, "step": base + stored, "publish": base + stored}
    return ProcessMemory(name="others", node=node, phases=phases)


def bytes_by_phase(processes: Sequence[ProcessMemory]) -> dict[Phase, int]:
    """Return phase -> bytes of all these processes on one node."""
    mapped = [process.shared_bytes for process in processes]
    twice = sum(mapped) - max(mapped, default=0)
    return {
        phase: sum(process.phases[phase] for process in processes) - (phase != "step") * twice
        for phase in get_args(Phase)
    }


def _peer_copies_bytes(copies: int) -> int:
    return copies * (STATE_COPIES - 1) // STATE_COPIES


def with_caches(
    processes: Sequence[ProcessMemory], slots: Sequence[Slot], cache: int
) -> list[ProcessMemory]:
    """Return the processes with the caches of their engines added. `cache`: bytes of one engine
    rank's cache."""
    ranks = Counter(
        (slot.node, f"engine-{slot.engine}") for slot in slots if slot.engine is not None
    )
    return [
        replace(
            process,
            phases={
                phase: size + ranks[process.node, process.name] * cache
                for phase, size in process.phases.items()
            },
        )
        for process in processes
    ]


SYSTEM_SHARE = 0.05
"""Share of main memory that the operating system needs."""
LARGEST_CAP = 8192
"""Largest cap of tokens of a microbatch that is not pinned, unless sequences are longer: larger
ones bring nothing."""
ENOUGH_TOKENS, ENOUGH_BYTES = 1024, 5 * GIB
"""Of a microbatch that is not pinned: tokens that it may have in any case, and what activations of
a larger one may take. What each microbatch costs whatever its length is then a small part: 2,464
tokens of SmolLM2-135M took 49.5, 45.1 and 37.0 s of CPU time in microbatches of at most 1,024,
2,048 and 4,096, with peaks of 3.1, 4.8 and 5.9 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Holds the decisions that depend on main memory."""

    trainer: TrainerLayout
    engines: EngineLayout
    cap: int
    """Tokens of a microbatch on one rank."""
    processes: list[ProcessMemory]
    """Processes of all nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeLoad:
    """Describes the needs of one computer, without the engines' caches."""

    ranks: TrainerBytes
    """Memory of all trainer ranks on the node; `host` is their other memory."""
    processes: list[ProcessMemory]
    num_ranks: int
    num_shards: int
    """Number of engine ranks on the node."""
    engine_weights: int

    @property
    def phases(self) -> dict[Phase, int]:
        """Return phase -> bytes of all processes."""
        return bytes_by_phase(self.processes)

    @property
    def total(self) -> int:
        """Return the bytes of the phase with the largest need."""
        return max(self.phases.values())


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
) -> MemoryFit:
    """Choose microbatches as large as memory allows, full recompute if smaller ones are not enough,
    and caches from the remaining memory. `size`: bytes of a weight. Raises FitError with the sum if
    the node with the largest needs is too small."""
    merged = publishes_merged(recipe, on_cpu=True, size=size)
    memory, budget = memory_of(recipe, facts, merged=merged), _budget(machine)
    colocated = any(slot.trainer_rank is not None and slot.engine is not None for slot in slots)
    num_collectors, numbers = choose_collectors(recipe, engines, Log()), _nodes_of(slots)
    kept_bytes = sent_copies(recipe, memory, colocated=colocated)
    stored = store_bytes(recipe, facts, num_collectors=num_collectors)
    # the kernel that sums each query by itself reads float32
    of_cache = 4 if recipe.train.on_policy == "exact" else size
    least = (
        memory.cache_bytes(engines, size=of_cache, tokens=longest_tokens(recipe), sequences=1)
        if engines.num
        else 0
    )
    layouts = [trainer]
    if recipe.train.recompute == "auto":
        layouts.append(replace(trainer, recompute="full"))

    def load_of(layout: TrainerLayout, cap: int) -> TrainerLoad:
        return _load(
            recipe, facts, layout, cap=cap, size=size, teachers=teachers, kept_bytes=kept_bytes
        )

    def activations(cap: int) -> int:
        return memory.worst_stage(trainer, load_of(trainer, cap)).activations

    for layout, cap in product(layouts, _caps(recipe, trainer, activations)):
        load = load_of(layout, cap)
        nodes = _nodes(
            memory,
            load,
            layout,
            engines,
            slots,
            sync=recipe.weights,
            stored=stored,
            collecting=collecting_bytes(recipe, machine, num_collectors, nodes=numbers),
        )
        node = max(nodes, key=lambda node: node.total)
        if node.total + node.num_shards * least <= budget:
            break
    else:
        raise _refusal(recipe, machine, node, least, budget)
    log.note("trainer.recompute", layout.recompute, _why_recompute(recipe, layout))
    tokens, cache = None, 0
    if engines.num:
        tokens = _cache_tokens(
            recipe,
            memory,
            engines,
            free_bytes=budget - node.total,
            num_shards=node.num_shards,
            size=of_cache,
            log=log,
        )
        cache = memory.cache_bytes(
            engines, size=of_cache, tokens=tokens, sequences=engines.max_running_requests
        )
    _note_memory(recipe, node, node.num_shards * cache, machine, log)
    return MemoryFit(
        trainer=layout,
        engines=replace(engines, max_total_tokens=tokens),
        cap=cap,
        processes=with_caches([one for node in nodes for one in node.processes], slots, cache),
    )


def _budget(machine: Machine) -> int:
    """Return the bytes that every node can provide: its free memory when it was probed, minus what
    the operating system needs."""
    free = (
        min(node.available_bytes or node.memory_bytes, int((1 - SYSTEM_SHARE) * node.memory_bytes))
        for node in machine.nodes
    )
    return min(free)


def _note_memory(recipe: Recipe, node: _NodeLoad, cache: int, machine: Machine, log: Log) -> None:
    phases = node.phases
    most = max(phases, key=lambda phase: phases[phase])
    log.note(
        "memory",
        f"{(node.total + cache) / GIB:.1f} GiB",
        f"{_sum_text(node, cache)}, of {_main_memory(machine)}; an estimate of the phase that "
        f"needs most, {PHASES[most]} ("
        + ", ".join(f"{phase} {(size + cache) / GIB:.1f}" for phase, size in phases.items())
        + ")",
    )
    note_copies(recipe, size_bytes=node.ranks.copies, log=log)


def _caps(
    recipe: Recipe,
    trainer: TrainerLayout,
    activations: Callable[[int], int],
) -> list[int]:
    """Return the pinned cap; else the largest useful cap, and its halves down to the longest
    sequence. `activations`: tokens of a microbatch -> bytes of one rank."""
    if recipe.train.max_tokens_per_microbatch:
        return [recipe.train.max_tokens_per_microbatch]
    longest = recipe.longest_sequence * recipe.sequences_per_row
    least = -(-longest // trainer.cp)
    halves = takewhile(
        lambda cap: cap > least,
        (LARGEST_CAP >> number for number in range(LARGEST_CAP.bit_length())),
    )
    caps = [*halves, least]
    worth = [cap for cap in caps if cap <= ENOUGH_TOKENS or activations(cap) <= ENOUGH_BYTES]
    return worth or caps[-1:]


def _distinct_tokens(recipe: Recipe, facts: ModelFacts, trainer: TrainerLayout) -> int | None:
    """Return the most positions of a step that are computed if sequences share prompts: each prompt
    once, and for each sequence its response with the position before it; None if they do not."""
    group, agent = recipe.rollout.samples_per_prompt, recipe.rollout.agent
    is_plain = agent == "single_turn" and not recipe.learns_from_rows
    if not (is_plain and shares_prompts(recipe, facts, trainer, group)):
        return None
    prompts = recipe.rollout.prompts_per_step
    own = group * (recipe.rollout.max_response_tokens + 1)
    return prompts * (recipe.data.max_prompt_tokens + own)


def _load(
    recipe: Recipe,
    facts: ModelFacts,
    trainer: TrainerLayout,
    *,
    cap: int,
    size: int,
    teachers: Sequence[ModelFacts],
    kept_bytes: int,
) -> TrainerLoad:
    is_exact = recipe.train.on_policy == "exact"
    tokens = recipe.sequences_per_step * recipe.longest_sequence
    most = -(-tokens // (trainer.dp * trainer.cp))
    return TrainerLoad(
        size=size,
        row_tokens=min(cap, most),
        distinct_tokens=_distinct_tokens(recipe, facts, trainer),
        num_microbatches=trainer.pp,
        keeps_reference=recipe.keeps_reference,
        critic="beside" if recipe.has_critic else "none",
        teachers=tuple(teachers),
        teachers_resident=True,
        takes_copies=recipe.fault.copy_every > 0,
        sleeps=False,
        bucket_bytes=0,
        packing=Packing(imbalance=recipe.train.expert_imbalance, longest=recipe.longest_sequence),
        on_host=True,
        sent_copies=kept_bytes,
        fused_swiglu=size == 4 or is_exact,
        keeps_float32=is_exact,
        efficiency=Efficiency(trainer_context=0),
        **recipe_load_fields(recipe),
    )


def _nodes(
    memory: MemoryModel,
    load: TrainerLoad,
    trainer: TrainerLayout,
    engines: EngineLayout,
    slots: Sequence[Slot],
    *,
    sync: Weights,
    stored: int,
    collecting: Mapping[int, int],
) -> list[_NodeLoad]:
    """Return [nodes] the loads of the nodes with slots. `sync`: how weights go to engines;
    `stored`: bytes of a step's samples in the object store of the driver's node; `collecting`:
    bytes of the collecting processes, by node."""
    stages = memory.stages(trainer, load)
    facts = memory.table.facts
    weights = (
        memory.engine_weights(engines, size=load.size, multiplies_plain=True) if engines.num else 0
    )
    published = memory.sent_weights(engines, size=load.size) if engines.num else 0
    bucket = bucket_bytes(sync.bucket_mib, on_cpu=True)
    # of an engine rank, which reads into it
    landing = bucket if sync.named_channel in ("rdma", "store") else 0
    sent = min(2 * bucket, published)  # one is written while the other is read
    largest = 0 if memory.slots else facts.vocab_size * facts.hidden_size
    compared = published + 3 * largest // engines.tp  # with three masks of the largest weight
    used = engine_workspace(facts, engines, size=load.size)
    widest = 4 * largest // trainer.tp

    def load_of(number: int) -> _NodeLoad:
        here = [slot for slot in slots if slot.node == number]
        ranks = {
            slot.trainer_rank: stages[slot.trainer_rank * trainer.pp // trainer.world_size]
            for slot in here
            if slot.trainer_rank is not None
        }
        shards = Counter(slot.engine for slot in here if slot.engine is not None)
        parts = [each.name for each in fields(TrainerBytes) if each.name != "turn"]
        return _NodeLoad(
            ranks=TrainerBytes(
                **{part: sum(getattr(rank, part) for rank in ranks.values()) for part in parts}
            ),
            processes=[
                *(
                    rank_memory(
                        f"trainer-rank-{rank}",
                        number,
                        of,
                        widest=widest,
                        sent=0 if rank else sent,
                    )
                    for rank, of in ranks.items()
                ),
                *(
                    engine_memory(
                        f"engine-{engine}",
                        number,
                        count,
                        weights=weights,
                        compared=compared,
                        used=used,
                        sent=sent,
                        kept_bytes=landing + (published if load.sent_copies else 0),
                        verifies=sync.verify,
                    )
                    for engine, count in shards.items()
                ),
                shared_processes_memory(
                    number,
                    copies=sum(rank.copies for rank in ranks.values()),
                    stored=0 if number else stored,
                    collecting=collecting.get(number, 0),
                ),
            ],
            num_ranks=len(ranks),
            num_shards=shards.total(),
            engine_weights=shards.total() * weights,
        )

    return [load_of(number) for number in _nodes_of(slots)]


def _nodes_of(slots: Sequence[Slot]) -> list[int]:
    return sorted({slot.node for slot in slots})


def _cache_tokens(
    recipe: Recipe,
    memory: MemoryModel,
    engines: EngineLayout,
    *,
    free_bytes: int,
    num_shards: int,
    size: int,
    log: Log,
) -> int:
    """Return the cache of one engine in tokens: the most that a step needs at once, or what fits
    into `free_bytes` bytes."""
    wanted, running = engines.max_total_tokens, engines.max_running_requests
    assert wanted is not None, "an engine on a CPU has no other measure for its cache"
    states = num_shards * memory.cache_bytes(engines, size=size, tokens=0, sequences=running)
    per_token = max(
        1, num_shards * memory.cache_bytes(engines, size=size, tokens=1 << 20, sequences=0)
    )
    most = (
        max(longest_tokens(recipe), int(max(0, free_bytes - states) / per_token * (1 << 20)))
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
    whole = min(int((1 - SYSTEM_SHARE) * each.memory_bytes) for each in machine.nodes)
    kind = MemoryTaken if budget < total <= whole else FitError
    return kind(
        f"recipe `{recipe.name}` does not fit in the main memory of a CPU with "
        f"{_main_memory(machine)}",
        why=f"{_sum_text(node, node.num_shards * least)} = {total / GIB:.1f} GiB > "
        f"{budget / GIB:.1f}"
        f"; the cache is for one sequence of {longest_tokens(recipe):,} tokens",
        fix=["--set fault.copy_every=0"] if node.ranks.copies else [],
    )


def _sum_text(node: _NodeLoad, cache: int) -> str:
    ranks = node.ranks
    parts = {
        "weights": ranks.weights,
        "gradients": ranks.gradients,
        "optimizer": ranks.optimizer,
        "activations": ranks.activations + ranks.logits + ranks.workspace,
        "other weights": ranks.host - ranks.copies,
        "copies": ranks.copies,
    }
    trainer = " + ".join(
        f"{name} {_gib(size)}"
        for name, size in parts.items()
        if size or name not in ("other weights", "copies")
    )
    rest = node.total - ranks.total - ranks.host - node.engine_weights
    engines = (
        f"{node.num_shards} engine rank{'s'[: node.num_shards > 1]}: "
        f"weights {_gib(node.engine_weights)} + cache {_gib(cache)}; "
    )
    ranks_said = f"{node.num_ranks} trainer rank{'s'[: node.num_ranks > 1]}: {trainer}; "
    return (
        f"{ranks_said if node.num_ranks else ''}"
        f"{engines if node.num_shards else ''}processes, and what they need for a moment, "
        f"{_gib(rest)}"
    )


def _gib(size: int) -> str:
    """Format GiB: '1.3'; a size that would be 0.0 has its own unit: '7.3 MiB'."""
    text = f"{size / GIB:.1f}"
    return format_bytes(size) if text == "0.0" and size else text


def _main_memory(machine: Machine) -> str:
    node = machine.nodes[0]
    there = f"{node.memory_bytes / GIB:.0f} GiB"
    if (free := node.available_bytes) and free < (1 - SYSTEM_SHARE) * node.memory_bytes:
        there += f", of which {free / GIB:.1f} are free"
    return there
