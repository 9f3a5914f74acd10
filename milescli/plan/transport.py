"""Plans the data that processes of a run exchange: the samples of a step, through Ray's object
store, and new weights, from trainer ranks to engines. Pure; called by `make` and by the memory
models."""

from __future__ import annotations

from dataclasses import dataclass

from milescli.core.plug_points import FORMATS
from milescli.core.units import GIB, MIB, format_bytes
from milescli.models.facts import ModelFacts
from milescli.plan.collectors import choose_collectors
from milescli.plan.memory import MemoryModel
from milescli.plan.types import EngineLayout, Log, TrainerLayout
from milescli.platform.machine import Machine
from milescli.recipe.schema import Recipe

MIN_STORE = 512 * MIB
"""Smallest size of Ray's object store in any run: /dev/shm may be small, and so are most batches.
"""
STORE_SHARE = 0.9
"""Share of /dev/shm that the store may take; weights in transit are there, too."""
OVERHEAD = 1.1
"""Bytes of the store for each byte of samples, for alignment and what Ray has not freed yet."""
TOKEN_BYTES = 13
"""Bytes of a token in a batch: its id (4), its loss mask (1), and in float32 its advantage and the
engine's log-prob."""
CHILDREN = 2
"""Number of engines to which an engine passes weights on."""
BUSIEST = 1.2
"""Most that the busiest trainer rank sends, as a multiple of the even share, as `weights.shards`
plans."""


def bytes_per_token(recipe: Recipe, facts: ModelFacts) -> int:
    """Return the bytes of one token of a batch, with the experts that engines chose and the
    log-probs of served teachers. Images are not counted: each is sent once per step."""
    routed = recipe.train.routing_replay * facts.num_layers * facts.topk
    taught = 8 * recipe.train.distill.top_k if recipe.teachers else 0
    return TOKEN_BYTES + routed * (1 if facts.num_experts <= 256 else 2) + taught


def step_bytes(recipe: Recipe, facts: ModelFacts) -> int:
    """Return the bytes of a step's samples in the object store, if all have the longest allowed
    length."""
    tokens = recipe.sequences_per_step * recipe.longest_sequence
    return int(OVERHEAD * tokens * bytes_per_token(recipe, facts))


def store_bytes(recipe: Recipe, facts: ModelFacts, *, num_collectors: int) -> int:
    """Return the bytes of samples in the object store: of one step; with collecting processes, also
    of the steps that new trainer ranks would repeat, which are otherwise in the driver."""
    step = step_bytes(recipe, facts)
    steps = recipe.fault.copy_every or recipe.checkpoint.every or recipe.train.steps
    retained = min(int(recipe.fault.kept_gib * GIB), steps * step)
    return step + (retained if num_collectors else 0)


def plan_store(
    recipe: Recipe, machine: Machine, facts: ModelFacts, engines: EngineLayout, log: Log
) -> int:
    """Return the size of Ray's object store on the driver's node. Logs a remedy if /dev/shm is too
    small for a step."""
    num_collectors = choose_collectors(recipe, engines, Log())
    needed = store_bytes(recipe, facts, num_collectors=num_collectors)
    shm = machine.nodes[0].shm_bytes
    available = int(STORE_SHARE * shm) if shm else max(needed, MIN_STORE)
    size = min(max(needed, MIN_STORE), available)
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


def sent_copies(recipe: Recipe, memory: MemoryModel, *, colocated: bool) -> int:
    """Return the number of copies that the trainer stores of the weights that it sent last, by
    which `weights.full_every` finds changes; if it stores any, engines store one. While engines are
    updated in waves, some still have the previous weights."""
    channel = recipe.weights.named_channel
    is_apart = channel in ("distributed", "store") or (channel == "auto" and not colocated)
    keeps = recipe.has_engines and recipe.weights.full_every > 1 and is_apart
    keeps = keeps and whole_reason(recipe, memory) is None
    return keeps * (2 if recipe.weights.wave_share < 1 else 1)


PIECE_LOCATIONS = {
    "tensor": "shared memory",
    "disk": "files of the run",
    "rdma": "memory that Mooncake reads",
}
"""Channel -> where engines find the pieces of weights that they read."""


def whole_reason(recipe: Recipe, memory: MemoryModel) -> str | None:
    """Return why weights are published as whole tensors; None if each rank sends its pieces."""
    if recipe.train.lora.is_on:
        return "an adapter is trained"
    if recipe.weights.format not in FORMATS.builtin:
        return "`weights.format` is your own"
    if memory.formats.engines == "nvfp4":
        return "the scales of NVFP4 cover whole matrices"
    return None


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
    nothing without engines. `size`: bytes of a weight."""
    if not engines.num:
        return
    ranks, place = trainer.world_size, PIECE_LOCATIONS.get(channel)
    if (why := whole_reason(recipe, memory)) is not None:
        how = f"are offered in {place}" if place else "go from rank 0 to every engine rank"
        size_bytes = memory.sent_weights(EngineLayout(), size=size)
        text = f"whole tensors {how}, as {why}"
        log.note("weights.transfer", format_bytes(size_bytes), text)
        if place is None and recipe.weights.full_every > 1:
            log.note("weights.full_every", 1, f"whole tensors are sent each time, as {why}")
        return
    stored = channel == "store"
    moved = transfer(
        memory, trainer, engines, size=size, shared=place is not None, passed_on=not stored
    )
    if place is not None:
        text = (
            f"each trainer rank (of {ranks}) offers about {format_bytes(moved.sent // ranks)} in "
            f"{place}, of which each engine rank reads its {format_bytes(moved.received)}"
        )
    elif stored:
        text = (
            f"each trainer rank (of {ranks}) writes at most {format_bytes(moved.busiest)} to "
            f"`weights.store`, from which each engine rank reads {format_bytes(moved.received)}"
        )
    else:
        text = (
            f"each trainer rank (of {ranks}) sends at most {format_bytes(moved.busiest)} (the "
            f"model to {moved.trees} of the engines, which pass it on), and each engine rank "
            f"receives {format_bytes(moved.received)} once and sends it at most twice"
        )
    if place is None and (every := recipe.weights.full_every) > 1:
        text += f"; {every - 1} of {every} publishes send only what changed"
    of_engine = format_bytes(moved.received * engines.tp)
    log.note("weights.transfer", of_engine, f"{text}; an estimate for whole pieces")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Describes one publish of all weights in pieces, in bytes."""

    sent: int
    """Bytes that all trainer ranks send together."""
    busiest: int
    """Upper bound of the bytes that the busiest trainer rank sends."""
    received: int
    """Bytes that each engine rank receives."""
    trees: int
    """Number of engines to which trainer ranks send directly; 0: all read shared memory."""
    children: int
    """Most engines to which one engine passes its weights on."""
    levels: int
    """Hops from a trainer rank to the last engine."""

    @property
    def largest(self) -> int:
        """Return the most bytes that any rank sends or receives."""
        return max(self.busiest, self.received * max(1, self.children))


def transfer(
    memory: MemoryModel,
    trainer: TrainerLayout,
    engines: EngineLayout,
    *,
    size: int,
    shared: bool,
    passed_on: bool = True,
    num_nodes: int = 1,
) -> Transfer:
    """Return the bytes that a publish moves, as `backends.sglang.weights` does it. `size`: bytes of
    a weight; `shared`: through shared memory of each node; `passed_on`: otherwise engines pass the
    weights on, or all of them read the same objects."""
    received, ranks = memory.sent_weights(engines, size=size), trainer.world_size
    if shared:
        model = memory.sent_weights(EngineLayout(), size=size)
        sent, trees, children, levels = num_nodes * model, 0, 0, 1
    else:
        trees = max(1, min(engines.num, ranks // engines.tp)) if passed_on else 1
        sent = trees * engines.tp * received
        of_tree = -(-engines.num // trees) if passed_on else 1
        children = min(CHILDREN, of_tree - 1)
        # the first engine of a tree is place 0, and place n is below (n - 1) // 2
        levels = of_tree.bit_length()
    return Transfer(
        sent=sent,
        busiest=min(sent, int(BUSIEST * sent / ranks)),
        received=received,
        trees=trees,
        children=children,
        levels=levels,
    )
