"""Plans layouts on accelerators: searches trainer and engines, combines the two (taking turns, or
in parallel), and explains the choice. Called by `make`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from milescli import models
from milescli.core.errors import FitError
from milescli.models.facts import ModelFacts
from milescli.plan import reasons
from milescli.plan.legal import (
    IllegalValue,
    cp_faults,
    engine_faults,
    expert_faults,
    faults,
    stage_faults,
    tp_faults,
)
from milescli.plan.on_cpu import context_length
from milescli.plan.search import (
    SIMILAR_FACTOR,
    EngineChoice,
    TrainerChoice,
    TrainerSearch,
    search_engines,
    search_trainer,
    similar_choices,
)
from milescli.plan.search_space import SearchSpace, divisors, search_space
from milescli.plan.static_memory import note_copies
from milescli.plan.types import Log, TrainerLayout
from milescli.platform.machine import Machine
from milescli.recipe.schema import Parallel, Recipe

_FINE_DEVICES = 64
"""Up to this many devices, splits are tried in eighths; beyond, in quarters."""
_MAX_FLEETS = 12
"""Most fleets of engines that are combined with trainers."""
_HOST_SHARE = 0.9
"""Share of a node's main memory that sleeping trainers and offloaded optimizers may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerEnginePair:
    """Holds a trainer and engines that fit together."""

    space: SearchSpace
    trainer: TrainerChoice
    engines: EngineChoice
    trainers: TrainerSearch
    fleets: list[EngineChoice]
    """All fleets, best first."""
    trainer_devices: int
    sync_s: float
    switch_s: float
    overlap: bool
    """True if rollout and training run in parallel."""

    @property
    def step_s(self) -> float:
        """Return the seconds of one step."""
        rollout, train = self.engines.seconds.total, self.trainer.seconds.total
        return (
            (max(rollout, train) if self.overlap else rollout + train) + self.sync_s + self.switch_s
        )

    @property
    def host_bytes(self) -> int:
        """Return the main memory of the node that needs most, in bytes: with trainer ranks and a
        step's samples, or with engines that store the weights that they received."""
        space = self.space
        received = space.memory.sent_weights(self.engines.layout, size=space.work.size)
        return max(
            self.trainer.needs.host * self._ranks_per_node + space.stored_bytes,
            bool(space.load.sent_copies) * received * space.devices_per_node,
        )

    @property
    def copies_bytes(self) -> int:
        """Return the bytes of one node's main memory that `fault.copy_every` takes."""
        return self.trainer.needs.copies * self._ranks_per_node

    @property
    def _ranks_per_node(self) -> int:
        return min(self.space.devices_per_node, self.trainer_devices)


def plan_devices(
    recipe: Recipe,
    machine: Machine,
    facts: ModelFacts,
    *,
    devices_per_node: int,
    colocated: bool,
    size: int,
    log: Log,
    teachers: Sequence[ModelFacts] = (),
) -> TrainerEnginePair:
    """Choose the best trainer and engines on `devices_per_node` devices of each node. Raises
    FitError with the equation if a pin is illegal or nothing fits."""
    pair = _simplest(
        list(
            pairs_by_share(
                recipe,
                machine,
                facts,
                devices_per_node=devices_per_node,
                colocated=colocated,
                size=size,
                teachers=teachers,
            ).values()
        )
    )
    rest_s = 0.0 if pair.overlap else pair.engines.seconds.total
    reasons.explain(pair.space, pair.trainer, pair.trainers, rest_s=rest_s, recipe=recipe, log=log)
    if pair.space.has_engines:
        reasons.explain_engines(pair.space, pair.engines, pair.fleets, recipe=recipe, log=log)
    note_copies(recipe, size_bytes=pair.copies_bytes, log=log)
    return pair


def pairs_by_share(
    recipe: Recipe,
    machine: Machine,
    facts: ModelFacts,
    *,
    devices_per_node: int,
    colocated: bool,
    size: int,
    teachers: Sequence[ModelFacts] = (),
) -> dict[int, TrainerEnginePair]:
    """Return number of engine devices -> best trainer and engines, for each number under which any
    fit. Raises FitError as `plan_devices`."""
    space = search_space(
        recipe,
        machine,
        models.table(facts),
        devices_per_node=devices_per_node,
        colocated=colocated,
        size=size,
        teachers=teachers,
    )
    num_devices = devices_per_node * recipe.machine.nodes
    check_pins(recipe, facts, num_devices)
    return _pairs(
        space, machine, num_devices, overlap=recipe.rollout.max_staleness > 0, recipe=recipe
    )


def _pairs(
    space: SearchSpace, machine: Machine, num_devices: int, *, overlap: bool, recipe: Recipe
) -> dict[int, TrainerEnginePair]:
    """Return number of engine devices -> best pair. Engines span nodes only if none fits within
    one, and the optimizer moves to the host only if that does not help either."""
    spaces = [space, replace(space, offload=True)] if space.offload is None else [space]
    shares = _engine_device_counts(space, num_devices)
    nearest: tuple[TrainerSearch, list[EngineChoice], int] | None = None
    for tried in spaces:
        ranks = {share: num_devices - (0 if tried.colocated else share) for share in shares}
        searches = {share: search_trainer(tried, ranks[share]) for share in shares}
        for across in (False, True):
            pairs = dict[int, TrainerEnginePair]()
            for share, trainers in searches.items():
                fleets = search_engines(tried, share, across=across)
                if nearest is None or (fleets and not nearest[1]):
                    nearest = (trainers, fleets, ranks[share])
                pair = _best_pair(
                    tried, machine, trainers, fleets, ranks=ranks[share], overlap=overlap
                )
                if pair is not None:
                    pairs[share] = pair
            if pairs:
                return pairs
    assert nearest is not None
    trainers, fleets, num_ranks = nearest
    raise reasons.refusal(space, recipe, machine, trainers, fleets, num_ranks=num_ranks)


def _simplest(pairs: list[TrainerEnginePair]) -> TrainerEnginePair:
    """Return the least divided of the pairs that are about as fast as the fastest."""
    fastest = min(pair.step_s for pair in pairs)
    return min(
        (pair for pair in pairs if pair.step_s <= fastest * SIMILAR_FACTOR),
        key=lambda pair: (
            pair.trainer.division_key,
            pair.engines.division_key,
            round(pair.step_s, 3),
        ),
    )


def _engine_device_counts(space: SearchSpace, num_devices: int) -> list[int]:
    """Return the numbers of devices to try for engines."""
    if not space.has_engines:
        return [0]
    if space.colocated:
        return [num_devices]
    pins, per_node = space.engine_pins, space.devices_per_node
    model_ranks = (space.pins.tp or 1) * (space.pins.pp or 1) * (space.pins.cp or 1)
    if pins.num is not None:
        sizes = [pins.tp] if pins.tp else divisors(per_node)
        shares = sorted({pins.num * size for size in sizes})
    elif num_devices > per_node:
        unit = per_node // 2 if num_devices <= 4 * per_node and per_node % 2 == 0 else per_node
        parts = (
            [number / 8 for number in range(1, 8)]
            if num_devices <= _FINE_DEVICES
            else [0.25, 0.5, 0.75]
        )
        shares = sorted({max(1, round(num_devices / unit * part)) * unit for part in parts})
    else:
        shares = sorted({max(1, round(num_devices * part)) for part in (0.25, 0.5, 0.75)})
    fitting = [
        share for share in shares if num_devices - share >= model_ranks * (space.pins.dp or 1)
    ]
    if fitting:
        return fitting
    share = num_devices - shares[0]
    raise FitError(
        f"split placement leaves {max(0, share)} devices for the trainer, but it needs "
        f"{model_ranks}",
        why=f"{num_devices} devices - {shares[0]} for engines = {share}; tp x pp x cp = "
        f"{model_ranks}",
        fix=[
            "--set engines.placement=colocated",
            f"--set engines.num={max(1, (num_devices - model_ranks) // (pins.tp or 1))}",
        ],
    )


def _best_pair(
    space: SearchSpace,
    machine: Machine,
    trainers: TrainerSearch,
    fleets: list[EngineChoice],
    *,
    ranks: int,
    overlap: bool,
) -> TrainerEnginePair | None:
    """Return the best pair that fits together, or None. Trainers and fleets that are about as fast
    as the fastest count as equally fast; slower fleets are tried if none of these fits."""
    fastest = similar_choices(fleets[:_MAX_FLEETS])
    pairs = [
        _pair(space, trainer, engines, trainers, fleets, ranks=ranks, overlap=overlap)
        for engines in fastest
        if (trainer := _trainer_for(engines, space, machine, trainers, ranks, overlap))
    ]
    if pairs:
        return _simplest(pairs)
    if len(fastest) == len(fleets):
        return None
    slower = fleets[len(fastest) :]
    return _best_pair(space, machine, trainers, slower, ranks=ranks, overlap=overlap)


def _trainer_for(
    engines: EngineChoice,
    space: SearchSpace,
    machine: Machine,
    trainers: TrainerSearch,
    ranks: int,
    overlap: bool,
) -> TrainerChoice | None:
    """Return the least divided of the fastest trainers that fit with these engines; None if there
    is none."""
    host = _HOST_SHARE * machine.nodes[0].memory_bytes - space.stored_bytes
    fitting = [
        trainer
        for trainer in trainers.fitting
        if not (space.colocated and publishing_bytes(space, trainer, engines) > space.usable_bytes)
        and trainer.needs.host * min(space.devices_per_node, ranks) <= host
    ]
    rest_s = 0.0 if overlap else engines.seconds.total
    return min(
        similar_choices(fitting, rest_s=rest_s),
        key=lambda choice: (choice.division_key, choice.rank),
        default=None,
    )


def _pair(
    space: SearchSpace,
    trainer: TrainerChoice,
    engines: EngineChoice,
    trainers: TrainerSearch,
    fleets: list[EngineChoice],
    *,
    ranks: int,
    overlap: bool,
) -> TrainerEnginePair:
    shared = space.colocated
    moved = trainer.needs.weights + trainer.needs.optimizer
    return TrainerEnginePair(
        space=space,
        trainer=trainer,
        engines=engines,
        trainers=trainers,
        fleets=fleets,
        trainer_devices=ranks,
        sync_s=space.time.publish_seconds(trainer.layout, engines.layout, space.work, shared=shared)
        if space.has_engines
        else 0.0,
        switch_s=space.time.switch_seconds(moved) * (shared + bool(space.load.teachers)),
        overlap=overlap and not shared,
    )


def publishing_bytes(space: SearchSpace, trainer: TrainerChoice, engines: EngineChoice) -> int:
    """Return the memory of a shared device during a publication, when the trainer has released
    gradients and optimizer, and the engine has no cache yet."""
    buckets = 2 * space.work.bucket_bytes
    return (
        trainer.needs.weights
        + engines.needs.weights
        + buckets
        + space.efficiency.trainer_context
        + space.efficiency.asleep
    )


def engine_context(recipe: Recipe, facts: ModelFacts, pair: TrainerEnginePair) -> EngineChoice:
    """Return the engines with the context length with which they start."""
    layout = replace(pair.engines.layout, context_length=context_length(recipe, facts))
    return replace(pair.engines, layout=layout)


def check_pins(recipe: Recipe, facts: ModelFacts, num_devices: int) -> None:
    """Raise FitError for the first pin that is impossible."""
    pins = recipe.parallel
    for fault in _pin_faults(pins, facts):
        raise fault.error()
    parts = (pins.tp or 1) * (pins.pp or 1) * (pins.cp or 1)
    if pins.dp is None and num_devices % parts and recipe.engines.placement != "split":
        raise FitError(
            f"tp x pp x cp = {pins.tp or 1} x {pins.pp or 1} x {pins.cp or 1} = {parts} does not "
            f"divide {num_devices} devices",
            why=f"{num_devices} / {parts} is not a whole number, so ranks would be unused",
            fix=f"--set parallel.dp={max(1, num_devices // parts)}   # leaves devices idle; or "
            "choose a layout that divides",
        )
    _check_engine_pins(recipe, facts, num_devices)


def _check_engine_pins(recipe: Recipe, facts: ModelFacts, num_devices: int) -> None:
    """Raise FitError if the pins allow no size of engines."""
    pins, per_node = recipe.engines, num_devices // recipe.machine.nodes
    sizes = [pins.tp] if pins.tp else divisors(num_devices)
    first: IllegalValue | None = None
    for size in sizes:
        ep = pins.ep or (size if facts.num_experts and facts.num_experts % size == 0 else 1)
        fault = next(
            engine_faults(facts, tp=size, ep=ep, attention_dp=pins.attention_dp or 1), None
        )
        if fault is None:
            break
        first = first or fault
    else:
        assert first is not None
        raise first.error()
    if pins.tp and pins.tp > num_devices:
        raise FitError(
            f"an engine of {pins.tp} devices is requested, but there are only {num_devices}",
            why=f"engines.tp {pins.tp} > {recipe.machine.nodes} nodes x {per_node} devices = "
            f"{num_devices}",
            fix=f"--set engines.tp={per_node}",
        )
    if pins.tp and recipe.machine.nodes > 1 and pins.tp % per_node and per_node % pins.tp:
        legal = max(size for size in divisors(per_node) if size <= pins.tp)
        raise FitError(
            f"engines of {pins.tp} devices would span nodes",
            why=f"a node has {per_node} devices: engines.tp must divide that, or be a multiple of "
            "it",
            fix=f"--set engines.tp={legal}",
        )


def _pin_faults(pins: Parallel, facts: ModelFacts) -> Iterator[IllegalValue]:
    if pins.tp:
        yield from tp_faults(facts, pins.tp)
    if pins.cp:
        yield from cp_faults(facts, pins.cp, tp=pins.tp or 1)
    ends = {
        "first_stage_layers": pins.first_stage_layers,
        "last_stage_layers": pins.last_stage_layers,
    }
    if pins.sequence_parallel is False and facts.num_experts and (pins.tp or 1) > 1:
        yield from faults(TrainerLayout(tp=pins.tp, ep=1, etp=1), facts)
    if pins.pp:
        yield from stage_faults(TrainerLayout(pp=pins.pp, **ends), facts)
    ep, etp = pins.ep or 1, pins.etp or 1
    if facts.num_experts or ep > 1 or etp > 1:
        group = ep * etp
        yield from expert_faults(TrainerLayout(ep=ep, etp=etp, dp=group), facts)
