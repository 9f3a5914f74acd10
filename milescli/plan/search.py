"""All legal layouts of trainer and engines on so many devices, those that fit, and the one whose
step is predicted to be shortest. Pure and deterministic: equal questions give equal answers, ties
go to the layout that is cut least."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile

from milescli.models.facts import ModelFacts
from milescli.plan.legal import (
    cp_faults,
    engine_faults,
    expert_faults,
    stage_faults,
    tp_faults,
    training_faults,
)
from milescli.plan.memory import (
    ENGINE_CONTEXT,
    ENGINE_GRAPHS,
    FRAGMENTS,
    TRAINER_CONTEXT,
    EngineBytes,
    MemoryModel,
    TrainerBytes,
    TrainerWish,
)
from milescli.plan.time import RolloutSeconds, TimeModel, TrainSeconds, Work
from milescli.plan.types import EngineLayout, TrainerLayout
from milescli.recipe.schema import EngineSettings, Parallel

MIN_CAP, MAX_CAP = 2048, 32768
"""Tokens of a microbatch on one rank, where nobody pins them."""
CP_TOKENS, LEAST_CP_TOKENS = 4096, 1024
"""Context parallelism is considered as long as each rank has so many positions of the longest
sequence; the second, where nothing else fits."""
MOST_REQUESTS = 512
"""That a group of an engine's devices answers at once, where nobody pins it."""
ALIKE = 1.10
"""Layouts whose predicted times lie within this factor are not told apart: the one that is cut
least is taken."""
STEP_ALIKE = 0.03
"""Nor are trainers that differ by less than this part of a whole step."""
CAP_ALIKE = 1.02
"""Larger microbatches are taken only where they are faster by more than this factor: smaller ones
leave room."""
MAX_FRACTION = 0.88
"""Of a device's memory that an engine's weights and cache take at most."""
MAX_SHARED_FRACTION = 0.80
"""The same where a trainer takes turns with it. Both were not tried on a device: they lie within
what the field runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is searched for."""

    memory: MemoryModel
    time: TimeModel
    work: Work
    wish: TrainerWish
    """Row and number of microbatches are filled in for each layout."""
    memory_bytes: int
    """Of one device."""
    devices_per_node: int
    longest: int
    """Tokens of the longest sequence that is trained on."""
    longest_served: int
    """The same that an engine must hold: an evaluation's answers may be longer."""
    pins: Parallel
    engine_pins: EngineSettings
    cap: int | None
    """Pinned tokens of a microbatch."""
    recompute: str
    """auto, none or full"""
    offload: bool | None
    colocated: bool

    @property
    def facts(self) -> ModelFacts:
        """Of the model."""
        return self.memory.table.facts

    @property
    def usable_bytes(self) -> int:
        """Of one device."""
        return int(self.memory_bytes * (1 - FRAGMENTS))

    @property
    def trainer_budget(self) -> int:
        """What a trainer rank may use; a sleeping engine's process is beside it."""
        return self.usable_bytes - (ENGINE_CONTEXT + ENGINE_GRAPHS if self.colocated else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerChoice:
    """One layout that was weighed."""

    layout: TrainerLayout
    cap: int
    needs: TrainerBytes
    """Of the fullest stage."""
    seconds: TrainSeconds
    fits: bool

    @property
    def rank(self) -> tuple[float, ...]:
        """Ascending: what is faster."""
        return (round(self.seconds.total, 3), *self.cuts, -self.cap)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Ascending: what is simpler to run, and cut less."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """One fleet that was weighed."""

    layout: EngineLayout
    needs: EngineBytes
    seconds: RolloutSeconds
    cache_tokens: int
    crowded: bool
    """Its cache does not hold all requests that it has to answer, at their mean length: some
    wait."""

    @property
    def rank(self) -> tuple[float, ...]:
        """Ascending: what is faster."""
        return (round(self.seconds.total, 3), *self.cuts)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Ascending: what waits less, and is cut less."""
        return (self.crowded, self.layout.tp, self.layout.attention_dp, self.layout.ep)


@dataclass(slots=True, kw_only=True)
class TrainerSearch:
    """All that was weighed."""

    fitting: list[TrainerChoice] = field(default_factory=list)
    """Best first."""
    nearest: TrainerChoice | None = None
    """Of those that do not fit, the one that needs the least."""
    num_weighed: int = 0


def search_trainer(question: Question, num_ranks: int) -> TrainerSearch:
    """Every legal layout of `num_ranks` ranks."""
    found = TrainerSearch()
    for shortest in (CP_TOKENS, LEAST_CP_TOKENS):
        for layout in legal_layouts(question, num_ranks, shortest=shortest):
            choice = weigh(question, layout)
            found.num_weighed += 1
            if choice.fits:
                found.fitting.append(choice)
            elif found.nearest is None or choice.needs.total < found.nearest.needs.total:
                found.nearest = choice
        if found.fitting:
            break
    found.fitting.sort(key=lambda choice: choice.rank)
    if question.pins.first_stage_layers is None and question.pins.last_stage_layers is None:
        _try_lighter_last_stages(question, found)
    return found


def legal_layouts(
    question: Question, num_ranks: int, *, shortest: int = CP_TOKENS
) -> Iterator[TrainerLayout]:
    """Tensor parallelism stays within a node; samples suffice for every data-parallel rank; context
    parallelism leaves each rank `shortest` positions of the longest sequence."""
    facts, pins, work = question.facts, question.pins, question.work
    within = [
        tp
        for tp in _divisors(num_ranks)
        if question.devices_per_node % tp == 0 or num_ranks <= question.devices_per_node
    ]
    for tp in _values(pins.tp, within, most=question.devices_per_node):
        if pins.tp is None and next(tp_faults(facts, tp), None):
            continue
        for cp in _values(
            pins.cp, _powers(num_ranks // tp), most=max(1, question.longest // shortest)
        ):
            if pins.cp is None and next(cp_faults(facts, cp, tp=tp), None):
                continue
            for pp in _values(pins.pp, _divisors(num_ranks // (tp * cp)), most=facts.num_layers):
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
                yield from _expert_layouts(question, tp=tp, cp=cp, pp=pp, dp=dp)


def _expert_layouts(
    question: Question, *, tp: int, cp: int, pp: int, dp: int
) -> Iterator[TrainerLayout]:
    facts, pins = question.facts, question.pins
    parallel = tp > 1 if pins.sequence_parallel is None else pins.sequence_parallel and tp > 1
    group = tp * cp * dp
    if facts.num_experts and tp > 1 and not parallel:
        return  # Megatron refuses it
    for ep in _values(
        pins.ep, _divisors(facts.num_experts) if facts.num_experts else [1], most=group
    ):
        if group % ep:
            continue
        etps = [tp] if not facts.num_experts or ep == 1 else sorted({1, tp})
        for etp in _values(pins.etp, etps, most=group):
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
            if not any(next(rule(layout, facts), None) for rule in rules):
                yield layout


def weigh(question: Question, layout: TrainerLayout) -> TrainerChoice:
    """The layout with the microbatches that suit it best; with recomputation only where nothing
    else fits, with the optimizer on the host only where that does not help either. If none fits:
    the smallest."""
    modes = [
        (recompute, offload)
        for offload in ([question.offload] if question.offload is not None else [False, True])
        for recompute in (
            [question.recompute] if question.recompute != "auto" else ["none", "full"]
        )
    ]
    caps = _caps(question, layout)
    smallest = _choice(
        question, replace(layout, recompute=modes[-1][0], offload_optimizer=modes[-1][1]), caps[0]
    )
    if not smallest.fits:
        return smallest
    for recompute, offload in modes:
        tried = replace(layout, recompute=recompute, offload_optimizer=offload)
        choices = (_choice(question, tried, cap) for cap in caps)
        if fitting := list(takewhile(lambda choice: choice.fits, choices)):
            fastest = min(choice.seconds.total for choice in fitting)
            return next(choice for choice in fitting if choice.seconds.total <= CAP_ALIKE * fastest)
    raise AssertionError(f"{layout} fits with the smallest microbatch, and then does not")


def _choice(question: Question, layout: TrainerLayout, cap: int) -> TrainerChoice:
    count = question.time.num_microbatches(layout, question.work, cap)
    wish = replace(question.wish, row_tokens=cap, num_microbatches=count)
    needs = question.memory.worst_stage(layout, wish)
    fits = needs.total <= question.trainer_budget
    nothing = TrainSeconds(compute=0, bubble=0, stages=0, tensor=0, experts=0, data=0, optimizer=0)
    seconds = question.time.train(layout, question.work, cap=cap) if fits else nothing
    return TrainerChoice(layout=layout, cap=cap, needs=needs, seconds=seconds, fits=fits)


def _caps(question: Question, layout: TrainerLayout) -> list[int]:
    """Ascending: those that hold the longest sequence."""
    if question.cap is not None:
        return [question.cap]
    least = -(-question.longest // layout.cp)
    first = max(MIN_CAP, -(-least // 1024) * 1024)
    caps = [first]
    while caps[-1] * 2 <= MAX_CAP and len(caps) < 4:
        caps.append(caps[-1] * 2)
    return caps


def _try_lighter_last_stages(question: Question, found: TrainerSearch) -> None:
    """The last stage computes the logits too: with fewer layers there the pipeline may run more
    evenly."""
    for choice in [each for each in found.fitting[:8] if each.layout.pp > 1]:
        layout = choice.layout
        mean = question.facts.num_layers // layout.pp
        for fewer in (1, 2, 3):
            lighter = replace(layout, last_stage_layers=mean - fewer)
            if mean - fewer < 1 or next(stage_faults(lighter, question.facts), None):
                break
            other = _choice(question, lighter, choice.cap)
            found.num_weighed += 1
            if other.fits and other.seconds.total < 0.99 * choice.seconds.total:
                found.fitting.append(other)
    found.fitting.sort(key=lambda choice: choice.rank)


def search_engines(question: Question, num_devices: int, *, across: bool) -> list[EngineChoice]:
    """Every fleet on `num_devices` devices that holds the model and at least one longest sequence,
    best first. `across`: of engines that span nodes, else of those within one."""
    facts, pins, found = question.facts, question.engine_pins, []
    sizes = _engine_sizes(num_devices, question.devices_per_node, across=across)
    for tp in _values(pins.tp, sizes, most=num_devices) if pins.tp is None or not across else []:
        num = pins.num or num_devices // tp
        if not num or num * tp > num_devices:
            continue
        for ep, attention_dp in _engine_axes(facts, pins, tp):
            if next(engine_faults(facts, tp=tp, ep=ep, attention_dp=attention_dp), None):
                continue
            choice = weigh_engines(question, num=num, tp=tp, ep=ep, attention_dp=attention_dp)
            if choice is not None:
                found.append(choice)
    busy = [choice for choice in found if choice.layout.num <= question.work.num_samples]
    return sorted(busy or found, key=lambda choice: choice.rank)


def _engine_sizes(num_devices: int, devices_per_node: int, *, across: bool) -> list[int]:
    """Within a node, or whole nodes."""
    if across:
        return [
            devices_per_node * nodes
            for nodes in (2, 4, 8, 16)
            if devices_per_node * nodes <= num_devices
        ]
    return [size for size in _divisors(devices_per_node) if num_devices % size == 0]


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
        groups += [group for group in _divisors(tp) if group > 1 and tp // group >= caches]
    return [(ep, group) for group in ([pins.attention_dp] if pins.attention_dp else groups)]


def weigh_engines(
    question: Question, *, num: int, tp: int, ep: int, attention_dp: int
) -> EngineChoice | None:
    """None where weights, or the longest sequence, do not fit."""
    pins, work, memory = question.engine_pins, question.work, question.memory
    layout = EngineLayout(
        num=num, tp=tp, ep=ep, attention_dp=attention_dp, context_length=question.longest_served
    )
    # SGLang gives each group its whole share of the requests
    wanted = max(8, min(MOST_REQUESTS * attention_dp, -(-work.num_samples // num)))
    running = pins.max_running_requests or -(-wanted // attention_dp) * attention_dp
    layout = replace(layout, max_running_requests=running, max_total_tokens=pins.max_total_tokens)
    fraction = pins.memory_fraction or _fraction(question, layout)
    layout = replace(layout, memory_fraction=fraction)
    needs = memory.engine(
        layout, memory_bytes=question.memory_bytes, size=work.size, longest=question.longest_served
    )
    beside = TRAINER_CONTEXT if question.colocated else 0
    if needs.total + beside > question.memory_bytes:
        return None
    if (
        memory.cache_room(
            layout, cache_bytes=needs.cache, size=work.size, tokens=question.longest_served
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
        seconds=question.time.rollout(layout, work, cache_bytes=needs.cache),
        cache_tokens=memory.cache_tokens(layout, cache_bytes=needs.cache, size=work.size),
        crowded=room < min(running, -(-work.num_samples // num)),
    )


def _fraction(question: Question, layout: EngineLayout) -> float:
    """What graphs, a prefill, both processes and a margin leave, in hundredths."""
    probe = question.memory.engine(
        layout,
        memory_bytes=question.memory_bytes,
        size=question.work.size,
        longest=question.longest_served,
    )
    taken = (
        probe.graphs
        + probe.workspace
        + question.memory_bytes * FRAGMENTS
        + (TRAINER_CONTEXT if question.colocated else 0)
    )
    most = MAX_SHARED_FRACTION if question.colocated else MAX_FRACTION
    return max(0.05, min(most, int(100 * (1 - taken / question.memory_bytes)) / 100))


def alike_s(best: float, *, beside: float = 0.0) -> float:
    """Seconds up to which a phase is about as long as one of `best` seconds; `beside`: seconds of
    the step that pass otherwise."""
    return max(ALIKE * best, best + STEP_ALIKE * (best + beside))


def publishing_bytes(question: Question, trainer: TrainerChoice, engines: EngineChoice) -> int:
    """Of a device that both share while weights are handed over: the trainer has shed gradients and
    optimizer, the engine has no cache yet."""
    buckets = 2 * question.work.bucket_bytes
    return (
        trainer.needs.weights
        + engines.needs.weights
        + buckets
        + TRAINER_CONTEXT
        + ENGINE_CONTEXT
        + ENGINE_GRAPHS
    )


def _values(pin: int | None, free: list[int], *, most: int) -> list[int]:
    return [pin] if pin is not None else [value for value in free if value <= most]


def _divisors(number: int) -> list[int]:
    return (
        [each for each in range(1, number + 1) if number % each == 0]
        if number < 512
        else _large_divisors(number)
    )


def _large_divisors(number: int) -> list[int]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def _powers(number: int) -> list[int]:
    return [each for each in _divisors(number) if each & (each - 1) == 0]
