"""Searches the layouts of engines and trainer, fastest first, and decides which predicted times
count as equal. Pure; called by `on_devices`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TypeVar

from milescli.models.facts import ModelFacts
from milescli.plan.legal import (
    cp_faults,
    engine_faults,
    expert_faults,
    faults,
    stage_faults,
    tp_faults,
    training_faults,
)
from milescli.plan.memory import FRAGMENTED_SHARE, EngineBytes, TrainerBytes
from milescli.plan.on_cpu import MAX_REQUESTS, MIN_REQUESTS
from milescli.plan.search_space import SearchSpace, divisors, values_to_try
from milescli.plan.time import RolloutSeconds, TrainSeconds
from milescli.plan.types import NO_ENGINES, EngineLayout, TrainerLayout
from milescli.recipe.schema import EngineSettings

MAX_FRACTION = 0.88
"""Largest share of a device's memory for an engine's weights and cache."""
MAX_SHARED_FRACTION = 0.80
"""Largest share for an engine that takes turns with a trainer. Both are untested on a device: they
lie within what the field runs."""
MIN_FORMAT_SHARE = 0.9
"""Least share of weights in the engines' format, relative to the fleet that has most in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """Describes one engine fleet that the search evaluated."""

    layout: EngineLayout
    needs: EngineBytes
    seconds: RolloutSeconds
    cache_tokens: int
    crowded: bool
    """True if its cache does not hold all of its requests at their mean length, so that some wait.
    """

    @property
    def rank(self) -> tuple[float, ...]:
        """Return a sort key that puts faster fleets first."""
        return (round(self.seconds.total, 3), *self.division_key)

    @property
    def division_key(self) -> tuple[int, ...]:
        """Return a sort key that puts fleets first whose requests wait less and that are less
        divided."""
        return (self.crowded, self.layout.tp, self.layout.attention_dp, self.layout.ep)


NO_FLEET = EngineChoice(
    layout=NO_ENGINES,
    needs=EngineBytes(weights=0, cache=0, graphs=0, workspace=0),
    seconds=RolloutSeconds(prefill=0.0, decode=0.0, running=0.0),
    cache_tokens=0,
    crowded=False,
)
"""The fleet of a run that samples nothing."""


def search_engines(space: SearchSpace, num_devices: int, *, across: bool) -> list[EngineChoice]:
    """Return every fleet on `num_devices` devices that holds the model and at least one longest
    sequence, best first. With `across`, engines span nodes; else each stays within one."""
    if not space.has_engines:
        return [NO_FLEET]
    layouts = _engine_layouts(space, num_devices, across=across)
    evaluated = (evaluate_engines(space, layout) for layout in layouts)
    choices = _in_format(space, [choice for choice in evaluated if choice is not None])
    busy = [choice for choice in choices if choice.layout.num <= space.work.num_samples]
    return sorted(busy or choices, key=lambda choice: choice.rank)


def _in_format(space: SearchSpace, choices: list[EngineChoice]) -> list[EngineChoice]:
    """Return the fleets to which the engines' format applies about as widely as to any: where ranks
    cut its blocks, weights stay plain."""
    shares = [space.memory.quantised_share(choice.layout) for choice in choices]
    least = MIN_FORMAT_SHARE * max(shares, default=0.0)
    return [choice for choice, share in zip(choices, shares, strict=True) if share >= least]


def nearest_engines(
    space: SearchSpace, num_devices: int
) -> tuple[EngineLayout, EngineBytes] | None:
    """Return the fleet of the largest engines, which need least memory on each rank, with that
    memory; None if `num_devices` devices are too few for the engines that are needed."""
    layouts = [
        layout
        for across in (False, True)
        for layout in _engine_layouts(space, num_devices, across=across)
    ]
    largest = max(layouts, key=lambda layout: layout.tp, default=None)
    return largest and (largest, _engine_bytes(space, largest))


def _engine_layouts(
    space: SearchSpace, num_devices: int, *, across: bool
) -> Iterator[EngineLayout]:
    """Yield the legal fleets for which there are enough devices."""
    facts, pins, work = space.facts, space.engine_pins, space.work
    sizes = _engine_sizes(num_devices, space.devices_per_node, across=across)
    for tp in (
        values_to_try(pins.tp, sizes, most=num_devices) if pins.tp is None or not across else []
    ):
        num = pins.num or num_devices // tp
        if num <= work.engines_apart or num * tp > num_devices:
            continue
        for ep, attention_dp in _engine_axes(facts, pins, tp):
            if next(engine_faults(facts, tp=tp, ep=ep, attention_dp=attention_dp), None):
                continue
            # SGLang gives each group its whole share of the requests
            wanted = max(
                MIN_REQUESTS, min(MAX_REQUESTS * attention_dp, -(-work.num_samples // num))
            )
            layout = EngineLayout(
                num=num,
                tp=tp,
                ep=ep,
                attention_dp=attention_dp,
                context_length=space.longest_served,
                max_running_requests=pins.max_running_requests
                or -(-wanted // attention_dp) * attention_dp,
                max_total_tokens=pins.max_total_tokens,
            )
            yield replace(layout, memory_fraction=pins.memory_fraction or _fraction(space, layout))


def _engine_sizes(num_devices: int, devices_per_node: int, *, across: bool) -> list[int]:
    """Return sizes within a node, or whole nodes."""
    if across:
        return [
            devices_per_node * nodes
            for nodes in (2, 4, 8, 16)
            if devices_per_node * nodes <= num_devices
        ]
    return [size for size in divisors(devices_per_node) if num_devices % size == 0]


def _engine_axes(facts: ModelFacts, pins: EngineSettings, tp: int) -> list[tuple[int, int]]:
    """Return pairs (ep, attention_dp) to try. With more devices than parts of a cache (the latent
    of MLA is one part; else key/value heads), several devices would hold the same part: large
    engines divide requests among groups of devices instead. Whole experts are distributed in large
    engines of MLA models, and if slices of experts would not have a whole size."""
    caches = 1 if facts.mla else facts.num_kv_heads
    shares_requests = facts.num_experts > 0 and not facts.mamba
    large = facts.mla is not None and facts.num_experts > 0 and tp >= 8
    whole = facts.num_experts > 0 and facts.moe_ffn_hidden_size % tp > 0
    ep = pins.ep or (tp if (large or whole) and facts.num_experts % tp == 0 else 1)
    groups = [1]
    if shares_requests and tp >= 8 and tp > caches:
        groups += [group for group in divisors(tp) if group > 1 and tp // group >= caches]
    return [(ep, group) for group in ([pins.attention_dp] if pins.attention_dp else groups)]


def evaluate_engines(space: SearchSpace, layout: EngineLayout) -> EngineChoice | None:
    """Evaluate one fleet. Return None if weights or the longest sequence do not fit."""
    work, memory, needs = space.work, space.memory, _engine_bytes(space, layout)
    context = space.efficiency.trainer_context if space.colocated else 0
    if needs.total + context > space.memory_bytes:
        return None
    if (
        memory.max_cached_requests(
            layout, cache_bytes=needs.cache, size=work.size, tokens=space.longest_served
        )
        < layout.attention_dp
    ):
        return None
    max_requests = memory.max_cached_requests(
        layout, cache_bytes=needs.cache, size=work.size, tokens=int(work.sequence_tokens)
    )
    return EngineChoice(
        layout=layout,
        needs=needs,
        seconds=space.time.rollout(layout, work, cache_bytes=needs.cache),
        cache_tokens=memory.cache_tokens(layout, cache_bytes=needs.cache, size=work.size),
        crowded=max_requests < min(layout.max_running_requests, -(-work.num_samples // layout.num)),
    )


def _engine_bytes(space: SearchSpace, layout: EngineLayout) -> EngineBytes:
    return space.memory.engine(
        layout,
        memory_bytes=space.memory_bytes,
        size=space.work.size,
        longest=space.longest_served,
        efficiency=space.efficiency,
    )


def _fraction(space: SearchSpace, layout: EngineLayout) -> float:
    """Return the share of memory that remains beside graphs, a prefill, both processes and a
    margin, in hundredths."""
    probe = _engine_bytes(space, layout)
    taken = (
        probe.graphs
        + probe.workspace
        + space.memory_bytes * FRAGMENTED_SHARE
        + (space.efficiency.trainer_context if space.colocated else 0)
    )
    most = MAX_SHARED_FRACTION if space.colocated else MAX_FRACTION
    return max(0.05, min(most, int(100 * (1 - taken / space.memory_bytes)) / 100))


MIN_CAP, MAX_CAP = 2048, 32768
"""Bounds of the tokens of a microbatch on one rank, unless pinned."""
CP_TOKENS, MIN_CP_TOKENS = 4096, 1024
"""Context parallelism is considered as long as each rank has this many positions of the longest
sequence; the second bound applies if nothing else fits."""
UNEVEN_GAIN = 0.99
"""A shorter last stage is only taken if the step then takes less than this share of the time."""
SIMILAR_CAP_FACTOR = 1.02
"""Larger microbatches are only taken if they are faster by more than this factor: smaller ones
leave room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerChoice:
    """Describes one trainer layout that the search evaluated."""

    layout: TrainerLayout
    cap: int
    needs: TrainerBytes
    """Memory of the fullest stage."""
    seconds: TrainSeconds
    fits: bool

    @property
    def rank(self) -> tuple[float, ...]:
        """Return a sort key that puts faster layouts first."""
        return (round(self.seconds.total, 3), *self.division_key, -self.cap)

    @property
    def division_key(self) -> tuple[int, ...]:
        """Return a sort key that puts layouts first that are simpler to run and less divided."""
        own = self.layout
        uneven = own.first_stage_layers is not None or own.last_stage_layers is not None
        return (
            own.offload_optimizer,
            own.cp,
            own.pp,
            own.tp,
            own.ep * own.etp,
            own.etp,
            own.recompute == "full",
            uneven,
        )


@dataclass(slots=True, kw_only=True)
class TrainerSearch:
    """Holds the trainer layouts that the search evaluated."""

    fitting: list[TrainerChoice] = field(default_factory=list)
    """Layouts that fit, best first."""
    nearest: TrainerChoice | None = None
    """The layout that needs least memory among those that do not fit."""
    num_evaluated: int = 0


def search_trainer(space: SearchSpace, num_ranks: int) -> TrainerSearch:
    """Evaluate every legal layout of `num_ranks` ranks."""
    search = TrainerSearch()
    for shortest in (CP_TOKENS, MIN_CP_TOKENS):
        for layout in legal_layouts(space, num_ranks, shortest=shortest):
            choice = evaluate_trainer(space, layout)
            search.num_evaluated += 1
            if choice.fits:
                search.fitting.append(choice)
            elif search.nearest is None or choice.needs.total < search.nearest.needs.total:
                search.nearest = choice
        if search.fitting:
            break
    search.fitting.sort(key=lambda choice: choice.rank)
    if space.pins.first_stage_layers is None and space.pins.last_stage_layers is None:
        _try_lighter_last_stages(space, search)
    return search


def legal_layouts(
    space: SearchSpace, num_ranks: int, *, shortest: int = CP_TOKENS
) -> Iterator[TrainerLayout]:
    """Yield the legal layouts in which tensor parallelism stays within a node, every data-parallel
    rank gets a sample, and context parallelism leaves each rank `shortest` positions of the longest
    sequence."""
    facts, pins, work = space.facts, space.pins, space.work
    within = [
        tp
        for tp in divisors(num_ranks)
        if space.devices_per_node % tp == 0 or num_ranks <= space.devices_per_node
    ]
    for tp in values_to_try(pins.tp, within, most=space.devices_per_node):
        if pins.tp is None and next(tp_faults(facts, tp), None):
            continue
        for cp in values_to_try(
            pins.cp, _powers_of_two(num_ranks // tp), most=max(1, space.longest // shortest)
        ):
            if pins.cp is None and next(cp_faults(facts, cp, tp=tp), None):
                continue
            for pp in values_to_try(
                pins.pp, divisors(num_ranks // (tp * cp)), most=facts.num_layers
            ):
                if pp == 1 and (pins.first_stage_layers or pins.last_stage_layers):
                    continue  # there would be no stages to pin
                dp = pins.dp or num_ranks // (tp * pp * cp)
                if (
                    not dp
                    or tp * pp * cp * dp > num_ranks
                    or (pins.dp is None and tp * pp * cp * dp != num_ranks)
                ):
                    continue
                if dp * work.updates > work.num_samples:
                    continue
                yield from _expert_layouts(space, tp=tp, cp=cp, pp=pp, dp=dp)


def _expert_layouts(
    space: SearchSpace, *, tp: int, cp: int, pp: int, dp: int
) -> Iterator[TrainerLayout]:
    facts, pins = space.facts, space.pins
    parallel = tp > 1 if pins.sequence_parallel is None else pins.sequence_parallel and tp > 1
    group = tp * cp * dp
    if facts.num_experts and tp > 1 and not parallel:
        return  # Megatron refuses it
    for ep in values_to_try(
        pins.ep, divisors(facts.num_experts) if facts.num_experts else [1], most=group
    ):
        if group % ep:
            continue
        etps = [tp] if not facts.num_experts or ep == 1 else sorted({1, tp})
        for etp in values_to_try(pins.etp, etps, most=group):
            layout = TrainerLayout(
                tp=tp,
                pp=pp,
                cp=cp,
                ep=ep,
                etp=etp,
                dp=dp,
                sequence_parallel=parallel,
                first_stage_layers=pins.first_stage_layers if pp > 1 else None,
                last_stage_layers=pins.last_stage_layers if pp > 1 else None,
            )
            rules = (expert_faults, training_faults, stage_faults)
            if any(next(rule(layout, facts), None) for rule in rules):
                continue
            if not any(next(faults(layout, other), None) for other in space.load.teachers):
                yield layout


def evaluate_trainer(space: SearchSpace, layout: TrainerLayout) -> TrainerChoice:
    """Return the layout with its best microbatches. Uses recompute only if nothing else fits, and
    moves the optimizer to the host only if that does not help either. If nothing fits, returns the
    choice that needs least memory."""
    modes = [
        (recompute, offload)
        for offload in ([space.offload] if space.offload is not None else [False, True])
        for recompute in ([space.recompute] if space.recompute != "auto" else ["none", "full"])
    ]
    caps = _caps(space, layout)
    smallest = _choice(
        space, replace(layout, recompute=modes[-1][0], offload_optimizer=modes[-1][1]), caps[0]
    )
    if not smallest.fits:
        return smallest
    for recompute, offload in modes:
        tried = replace(layout, recompute=recompute, offload_optimizer=offload)
        choices = (_choice(space, tried, cap) for cap in caps)
        if fitting := list(takewhile(lambda choice: choice.fits, choices)):
            fastest = min(choice.seconds.total for choice in fitting)
            return next(
                choice for choice in fitting if choice.seconds.total <= SIMILAR_CAP_FACTOR * fastest
            )
    raise AssertionError(f"{layout} fits with the smallest microbatch, and then does not")


def _choice(space: SearchSpace, layout: TrainerLayout, cap: int) -> TrainerChoice:
    # lengths are not known, so every stage has room for as many microbatches as it can hold
    load = replace(space.load, row_tokens=cap, num_microbatches=layout.pp)
    needs = space.memory.worst_stage(layout, load)
    fits = needs.total <= space.trainer_budget
    nothing = TrainSeconds(compute=0, bubble=0, stages=0, tensor=0, experts=0, data=0, optimizer=0)
    seconds = space.time.train(layout, space.work, cap=cap) if fits else nothing
    return TrainerChoice(layout=layout, cap=cap, needs=needs, seconds=seconds, fits=fits)


def _caps(space: SearchSpace, layout: TrainerLayout) -> list[int]:
    """Return the microbatch caps that can hold the longest sequence, ascending."""
    if space.cap is not None:
        return [space.cap]
    least = -(-space.longest // layout.cp)
    first = max(MIN_CAP, -(-least // 1024) * 1024)
    caps = [first]
    while caps[-1] * 2 <= MAX_CAP and len(caps) < 4:
        caps.append(caps[-1] * 2)
    return caps


def _try_lighter_last_stages(space: SearchSpace, search: TrainerSearch) -> None:
    """Also evaluate layouts with fewer layers on the last stage: it computes the logits, too, so
    the pipeline may then be better balanced."""
    for choice in [best for best in search.fitting[:8] if best.layout.pp > 1]:
        layout = choice.layout
        mean = space.facts.num_layers // layout.pp
        for fewer in (1, 2, 3):
            lighter = replace(layout, last_stage_layers=mean - fewer)
            models = (space.facts, *space.load.teachers)
            if mean - fewer < 1 or any(next(stage_faults(lighter, own), None) for own in models):
                break
            other = _choice(space, lighter, choice.cap)
            search.num_evaluated += 1
            if other.fits and other.seconds.total < UNEVEN_GAIN * choice.seconds.total:
                search.fitting.append(other)
    search.fitting.sort(key=lambda choice: choice.rank)


def _powers_of_two(number: int) -> list[int]:
    """Return the powers of two that divide the number."""
    return [value for value in divisors(number) if value & (value - 1) == 0]


SIMILAR_FACTOR = 1.10
"""Layouts whose predicted times differ by at most this factor count as equally fast: the least
divided one is chosen."""
SIMILAR_STEP_SHARE = 0.03
"""Trainers that differ by less than this share of a whole step count as equally fast, too."""

_Choice = TypeVar("_Choice", TrainerChoice, EngineChoice)


def similar_s(best: float, *, rest_s: float = 0.0) -> float:
    """Return the longest time of a phase that counts as equal to `best` seconds; `rest_s`: seconds
    of the step outside the phase."""
    return max(SIMILAR_FACTOR * best, best + SIMILAR_STEP_SHARE * (best + rest_s))


def similar_choices(choices: Sequence[_Choice], *, rest_s: float = 0.0) -> list[_Choice]:
    """Return the choices that are about as fast as the first, which is the fastest; `rest_s`:
    seconds of a step that pass outside or in parallel."""
    if not choices:
        return []
    most = similar_s(choices[0].seconds.total, rest_s=rest_s)
    return [choice for choice in choices if choice.seconds.total <= most]
