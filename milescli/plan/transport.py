"""Plans what travels between the processes of a run: the samples of a step, through Ray's object
store, and new weights, from trainer ranks to engines. Pure; called by `make` and by the memory
models."""

from __future__ import annotations

from milescli.core.units import GIB, MIB, format_bytes
from milescli.models.facts import ModelFacts
from milescli.plan.collectors import choose_collectors
from milescli.plan.memory import MemoryModel
from milescli.plan.types import EngineLayout, Log, TrainerLayout
from milescli.platform.machine import Machine
from milescli.recipe.schema import Recipe

LEAST_STORE = 512 * MIB
"""Bytes of Ray's object store that any run has: /dev/shm may be small, and so are most batches."""
STORE_SHARE = 0.9
"""Share of /dev/shm that the store may take; weights in transit lie there, too."""
OVERHEAD = 1.1
"""Bytes of the store for each byte of samples, for what Ray aligns and has not yet freed."""
TOKEN_BYTES = 13
"""Bytes of a token in a batch: its id (4), its place on the loss mask (1), and in float32 its
advantage and the engine's log-prob."""
BUSIEST = 1.2
"""Times the even share that the busiest trainer rank sends at most, as `weights.shards` plans."""


def bytes_per_token(recipe: Recipe, facts: ModelFacts) -> int:
    """Return the bytes of one token of a batch, with the experts that engines chose and what served
    teachers said of it. Images are not counted: each travels once a step."""
    routed = recipe.train.routing_replay * facts.num_layers * facts.topk
    taught = 8 * recipe.train.distill.top_k if recipe.teachers else 0
    return TOKEN_BYTES + routed * (1 if facts.num_experts <= 256 else 2) + taught


def step_bytes(recipe: Recipe, facts: ModelFacts) -> int:
    """Return the bytes of a step's samples in the object store, if all are as long as they may
    be."""
    tokens = recipe.sequences_per_step * recipe.longest_sequence
    return int(OVERHEAD * tokens * bytes_per_token(recipe, facts))


def store_bytes(recipe: Recipe, facts: ModelFacts, *, num_collectors: int) -> int:
    """Return the bytes of samples in the object store: of one step; where processes collect, also
    those of the steps that new trainer ranks would repeat, which else lie in the driver."""
    step = step_bytes(recipe, facts)
    steps = recipe.fault.copy_every or recipe.checkpoint.every or recipe.train.steps
    kept = min(int(recipe.fault.kept_gib * GIB), steps * step)
    return step + (kept if num_collectors else 0)


def plan_store(
    recipe: Recipe, machine: Machine, facts: ModelFacts, engines: EngineLayout, log: Log
) -> int:
    """Return the size of Ray's object store on the driver's node. Logs a remedy where /dev/shm is
    too small for a step."""
    num_collectors = choose_collectors(recipe, facts, engines, Log())
    needed = store_bytes(recipe, facts, num_collectors=num_collectors)
    shm = machine.nodes[0].shm_bytes
    room = int(STORE_SHARE * shm) if shm else max(needed, LEAST_STORE)
    size = min(max(needed, LEAST_STORE), room)
    why = (
        f"{recipe.sequences_per_step:,} x {recipe.longest_sequence:,} tokens of "
        f"{bytes_per_token(recipe, facts)} bytes are at most "
        f"{format_bytes(step_bytes(recipe, facts))} a step"
        + f"; with those that `fault.kept_gib` keeps, {format_bytes(needed)}"
        * (num_collectors > 0)
    )
    log.note("object store", format_bytes(size), why)
    if size < needed:
        log.note(
            "/dev/shm",
            format_bytes(shm),
            f"too small for samples of {format_bytes(needed)}: Ray will write the rest "
            "to disk, which is slow; enlarge it (docker run --shm-size=..., or mount -o remount,"
            "size=... /dev/shm)",
        )
    return size


def keeps_sent(recipe: Recipe, *, colocated: bool) -> bool:
    """Return True if trainer and engines keep a copy of the weights that were sent last, from which
    `weights.full_every` finds and applies changes."""
    channel = recipe.weights.channel
    is_apart = channel == "distributed" or (channel == "auto" and not colocated)
    return recipe.has_engines and recipe.weights.full_every > 1 and is_apart


def note_transfer(
    recipe: Recipe,
    memory: MemoryModel,
    trainer: TrainerLayout,
    engines: EngineLayout,
    channel: str,
    *,
    size: int,
    log: Log,
) -> None:
    """Log the bytes of a publish that each trainer rank sends and each engine rank receives;
    nothing where there are no engines. `size`: bytes of a weight."""
    if not engines.num:
        return
    received, ranks = memory.sent_weights(engines, size=size), trainer.world_size
    of_engine = received * engines.tp
    if channel == "tensor":
        said = (
            f"each trainer rank (of {ranks}) offers about {format_bytes(of_engine // ranks)} in "
            f"shared memory, of which each engine rank copies its {format_bytes(received)}"
        )
    else:
        trees = max(1, min(engines.num, ranks // engines.tp))
        sent = int(BUSIEST * trees * of_engine / ranks)
        said = (
            f"each trainer rank (of {ranks}) sends at most {format_bytes(sent)} (the model to "
            f"{trees} of the engines, which pass it on), and each engine rank receives "
            f"{format_bytes(received)} once and sends it at most twice"
        )
        if (every := recipe.weights.full_every) > 1:
            said += f"; {every - 1} of {every} publishes send only what changed"
    log.note("weights.transfer", format_bytes(of_engine), f"{said}; an estimate for whole pieces")
