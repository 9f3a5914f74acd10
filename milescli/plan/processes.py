"""What each process of a run on a CPU holds of main memory, phase by phase. Pure; called by
`main_memory`, which sums it up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from milescli.core.units import MIB
from milescli.models.facts import ModelFacts
from milescli.plan.memory import TrainerBytes
from milescli.plan.on_cpu import PREFILL_TOKENS
from milescli.plan.static_memory import HELD
from milescli.plan.types import EngineLayout, Phase, ProcessMemory, Slot

RANK_PROCESS = 650 * MIB
"""Of a trainer rank without its model: Python, torch, Megatron-Core, and what allocator and kernels
keep once it has trained. Seen of the quickstart's and of SmolLM2-135M; as are the next two, of
pages that processes share each one's part."""
ENGINE_PROCESS = 430 * MIB
"""Of an engine rank without its model, with its actor's, the server's and the detokenizer's
processes."""
ENGINE_KERNELS = 350 * MIB
"""Of an engine rank once it has sampled for long: kernels for as many numbers of requests and
tokens as its caches keep."""
SESSION = 950 * MIB
"""Driver, router and Ray's own processes on one node, and the process that engines are forked
from."""
HEAP = 0.1
"""Of activations: what the allocator holds between rows of different lengths."""
PHASES: dict[Phase, str] = {
    "start": "before the first step",
    "step": "training",
    "publish": "publishing after a step",
}


def of_rank(name: str, node: int, rank: TrainerBytes, *, widest: int, sent: int) -> ProcessMemory:
    """`widest`: bytes of the gradient of the largest weight (an embedding of a large vocabulary),
    which is there twice for a moment; `sent`: of weights on their way. A model is built of weights
    that are there once more, before gradients and optimizer are."""
    base = RANK_PROCESS + rank.host - _in_keeper(rank.copies)
    step = base + rank.total + int(HEAP * rank.activations) + 2 * widest
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


def of_engine(
    name: str, node: int, num_ranks: int, *, weights: int, compared: int, used: int, sent: int
) -> ProcessMemory:
    """`compared`: bytes of the copy with which the first publication is compared; `used`: of
    `engine_workspace`; `sent`: of a bucket of weights. Weights are read from a file of half as
    many bytes, which are there beside them."""
    held = ENGINE_PROCESS + weights
    return ProcessMemory(
        name=name,
        node=node,
        phases={
            "start": num_ranks * (held + max(compared + sent, used, weights // 2)),
            "step": num_ranks * (held + used + ENGINE_KERNELS),
            "publish": num_ranks * (held + used + ENGINE_KERNELS + sent),
        },
        shared_bytes=num_ranks * sent,
    )


def engine_workspace(facts: ModelFacts, engines: EngineLayout, *, size: int) -> int:
    """Of one engine rank beside weights and cache, bytes: the widest tensors of a prefill, and
    float32 logits of the requests that run, with copies for sampling."""
    tokens = min(PREFILL_TOKENS, engines.max_running_requests * engines.context_length)
    wide = max(facts.ffn_hidden_size, facts.topk * facts.moe_ffn_hidden_size) / engines.tp
    prefill = tokens * size * (6 * facts.hidden_size + 3 * wide)
    return int(prefill + 3 * 4 * engines.max_running_requests * facts.vocab_size)


def of_others(node: int, *, copies: int) -> ProcessMemory:
    """Driver, router and Ray; and whoever keeps the copies of all ranks' states (`copies` bytes
    with those that are beside the ranks)."""
    held = SESSION + _in_keeper(copies)
    return ProcessMemory(name="others", node=node, phases=dict.fromkeys(get_args(Phase), held))


def sum_of(processes: Sequence[ProcessMemory]) -> dict[Phase, int]:
    """Phase -> bytes of all these processes on one node."""
    mapped = [process.shared_bytes for process in processes]
    twice = sum(mapped) - max(mapped, default=0)
    return {
        phase: sum(process.phases[phase] for process in processes) - (phase != "step") * twice
        for phase in get_args(Phase)
    }


def _in_keeper(copies: int) -> int:
    return copies * (HELD - 1) // HELD


def with_caches(
    processes: Sequence[ProcessMemory], slots: Sequence[Slot], cache: int
) -> list[ProcessMemory]:
    """`cache`: of one engine rank."""
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
