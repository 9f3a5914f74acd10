"""All fleets of engines on so many devices that hold the model, the fastest first. Pure and
deterministic: ties go to engines that are cut least."""

from __future__ import annotations

from dataclasses import dataclass, replace

from milescli.models.facts import ModelFacts
from milescli.plan.legal import engine_faults
from milescli.plan.memory import FRAGMENTS, EngineBytes
from milescli.plan.on_cpu import LEAST_REQUESTS, MOST_REQUESTS
from milescli.plan.search_space import SearchSpace, divisors, values_to_try
from milescli.plan.time import RolloutSeconds
from milescli.plan.types import NO_ENGINES, EngineLayout
from milescli.recipe.schema import EngineSettings

MAX_FRACTION = 0.88
"""Of a device's memory that an engine's weights and cache take at most."""
MAX_SHARED_FRACTION = 0.80
"""The same where a trainer takes turns with it. Both were not tried on a device: they lie within
what the field runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """One fleet that was weighed."""

    layout: EngineLayout
    needs: EngineBytes
    seconds: RolloutSeconds
    cache_tokens: int
    crowded: bool
    """Its cache does not hold all requests that it has to run, at their mean length: some
    wait."""

    @property
    def rank(self) -> tuple[float, ...]:
        """Ascending: what is faster."""
        return (round(self.seconds.total, 3), *self.cuts)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Ascending: what waits less, and is cut less."""
        return (self.crowded, self.layout.tp, self.layout.attention_dp, self.layout.ep)


NO_FLEET = EngineChoice(
    layout=NO_ENGINES,
    needs=EngineBytes(weights=0, cache=0, graphs=0, workspace=0),
    seconds=RolloutSeconds(prefill=0.0, decode=0.0, running=0.0),
    cache_tokens=0,
    crowded=False,
)
"""Of a run that samples nothing."""


def search_engines(space: SearchSpace, num_devices: int, *, across: bool) -> list[EngineChoice]:
    """Every fleet on `num_devices` devices that holds the model and at least one longest sequence,
    best first. `across`: of engines that span nodes, else of those within one."""
    if not space.has_engines:
        return [NO_FLEET]
    facts, pins, choices = space.facts, space.engine_pins, list[EngineChoice]()
    sizes = _engine_sizes(num_devices, space.devices_per_node, across=across)
    for tp in (
        values_to_try(pins.tp, sizes, most=num_devices) if pins.tp is None or not across else []
    ):
        num = pins.num or num_devices // tp
        if num <= space.work.engines_apart or num * tp > num_devices:
            continue
        for ep, attention_dp in _engine_axes(facts, pins, tp):
            if next(engine_faults(facts, tp=tp, ep=ep, attention_dp=attention_dp), None):
                continue
            choice = weigh_engines(space, num=num, tp=tp, ep=ep, attention_dp=attention_dp)
            if choice is not None:
                choices.append(choice)
    busy = [choice for choice in choices if choice.layout.num <= space.work.num_samples]
    return sorted(busy or choices, key=lambda choice: choice.rank)


def _engine_sizes(num_devices: int, devices_per_node: int, *, across: bool) -> list[int]:
    """Within a node, or whole nodes."""
    if across:
        return [
            devices_per_node * nodes
            for nodes in (2, 4, 8, 16)
            if devices_per_node * nodes <= num_devices
        ]
    return [size for size in divisors(devices_per_node) if num_devices % size == 0]


def _engine_axes(facts: ModelFacts, pins: EngineSettings, tp: int) -> list[tuple[int, int]]:
    """(ep, attention_dp). Where devices outnumber what a cache can be cut into (the latent of MLA
    is one; else key/value heads), they would hold copies of it: large engines share out requests to
    groups of them instead. Whole experts are shared out in large engines of MLA models, and where
    slices of them would not be whole."""
    caches = 1 if facts.mla else facts.num_kv_heads
    shares_requests = facts.num_experts > 0 and not facts.mamba
    large = facts.mla is not None and facts.num_experts > 0 and tp >= 8
    whole = facts.num_experts > 0 and facts.moe_ffn_hidden_size % tp > 0
    ep = pins.ep or (tp if (large or whole) and facts.num_experts % tp == 0 else 1)
    groups = [1]
    if shares_requests and tp >= 8 and tp > caches:
        groups += [group for group in divisors(tp) if group > 1 and tp // group >= caches]
    return [(ep, group) for group in ([pins.attention_dp] if pins.attention_dp else groups)]


def weigh_engines(
    space: SearchSpace, *, num: int, tp: int, ep: int, attention_dp: int
) -> EngineChoice | None:
    """None where weights, or the longest sequence, do not fit."""
    pins, work, memory = space.engine_pins, space.work, space.memory
    layout = EngineLayout(
        num=num, tp=tp, ep=ep, attention_dp=attention_dp, context_length=space.longest_served
    )
    # SGLang gives each group its whole share of the requests
    wanted = max(LEAST_REQUESTS, min(MOST_REQUESTS * attention_dp, -(-work.num_samples // num)))
    running = pins.max_running_requests or -(-wanted // attention_dp) * attention_dp
    layout = replace(layout, max_running_requests=running, max_total_tokens=pins.max_total_tokens)
    fraction = pins.memory_fraction or _fraction(space, layout)
    layout = replace(layout, memory_fraction=fraction)
    needs = memory.engine(
        layout,
        memory_bytes=space.memory_bytes,
        size=work.size,
        longest=space.longest_served,
        reached=space.reached,
    )
    beside = space.reached.trainer_context if space.colocated else 0
    if needs.total + beside > space.memory_bytes:
        return None
    if (
        memory.cache_room(
            layout, cache_bytes=needs.cache, size=work.size, tokens=space.longest_served
        )
        < attention_dp
    ):
        return None
    room = memory.cache_room(
        layout, cache_bytes=needs.cache, size=work.size, tokens=int(work.sequence_tokens)
    )
    return EngineChoice(
        layout=layout,
        needs=needs,
        seconds=space.time.rollout(layout, work, cache_bytes=needs.cache),
        cache_tokens=memory.cache_tokens(layout, cache_bytes=needs.cache, size=work.size),
        crowded=room < min(running, -(-work.num_samples // num)),
    )


def _fraction(space: SearchSpace, layout: EngineLayout) -> float:
    """What graphs, a prefill, both processes and a margin leave, in hundredths."""
    probe = space.memory.engine(
        layout,
        memory_bytes=space.memory_bytes,
        size=space.work.size,
        longest=space.longest_served,
        reached=space.reached,
    )
    taken = (
        probe.graphs
        + probe.workspace
        + space.memory_bytes * FRAGMENTS
        + (space.reached.trainer_context if space.colocated else 0)
    )
    most = MAX_SHARED_FRACTION if space.colocated else MAX_FRACTION
    return max(0.05, min(most, int(100 * (1 - taken / space.memory_bytes)) / 100))
