"""Layouts on accelerators: searches trainer and engines, puts the two together (taking turns, or
side by side), and says why. Called by `make`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from milescli import models
from milescli.core.errors import FitError
from milescli.models.facts import ModelFacts
from milescli.plan import reasons
from milescli.plan.copies import note_copies
from milescli.plan.decisions import Log
from milescli.plan.on_cpu import context_length
from milescli.plan.pins import check_pins
from milescli.plan.search_engines import EngineChoice, search_engines
from milescli.plan.search_space import SearchSpace, divisors, search_space
from milescli.plan.search_trainer import TrainerChoice, TrainerSearch, search_trainer
from milescli.plan.ties import ALIKE, alike
from milescli.platform.machine import Machine
from milescli.recipe.schema import Recipe

_FINE_DEVICES = 64
"""Up to so many devices, splits are tried in eighths; beyond, in quarters."""
_MANY = 12
"""Fleets that are weighed against trainers."""
_HOST_SHARE = 0.9
"""Of a node's main memory that sleeping trainers and offloaded optimizers may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Trainer and engines that fit together."""

    space: SearchSpace
    trainer: TrainerChoice
    engines: EngineChoice
    trainers: TrainerSearch
    fleets: list[EngineChoice]
    """All, best first."""
    trainer_devices: int
    sync_s: float
    turn_s: float
    overlap: bool
    """Rollout and training go on at once."""

    @property
    def step_s(self) -> float:
        """Of one step."""
        rollout, train = self.engines.seconds.total, self.trainer.seconds.total
        return (
            (max(rollout, train) if self.overlap else rollout + train) + self.sync_s + self.turn_s
        )

    @property
    def host_bytes(self) -> int:
        """Of one node."""
        return self.trainer.needs.host * self._ranks_per_node

    @property
    def copies_bytes(self) -> int:
        """The same, of what `fault.copy_every` takes alone."""
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
) -> Pair:
    """The best trainer and engines on `devices_per_node` devices of each wanted node. Raises
    FitError with the equation where a pin is illegal, or nothing fits."""
    table = models.table(facts)
    space = search_space(
        recipe,
        machine,
        table,
        devices_per_node=devices_per_node,
        colocated=colocated,
        size=size,
        teachers=teachers,
    )
    num_devices = devices_per_node * recipe.machine.nodes
    check_pins(recipe, facts, num_devices)
    pair = _best(
        space, machine, num_devices, overlap=recipe.rollout.max_staleness > 0, recipe=recipe
    )
    beside = 0.0 if pair.overlap else pair.engines.seconds.total
    reasons.explain(pair.space, pair.trainer, pair.trainers, beside=beside, recipe=recipe, log=log)
    if space.has_engines:
        reasons.explain_engines(pair.space, pair.engines, pair.fleets, recipe=recipe, log=log)
    note_copies(recipe, size_bytes=pair.copies_bytes, log=log)
    return pair


def _best(
    space: SearchSpace, machine: Machine, num_devices: int, *, overlap: bool, recipe: Recipe
) -> Pair:
    """Engines span nodes only where none within a node will do, and the optimizer goes to the host
    only where neither helps."""
    spaces = [space, replace(space, offload=True)] if space.offload is None else [space]
    shares = _shares(space, num_devices)
    nearest: tuple[TrainerSearch, list[EngineChoice], int] | None = None
    for tried in spaces:
        ranks = {share: num_devices - (0 if tried.colocated else share) for share in shares}
        searches = {share: search_trainer(tried, ranks[share]) for share in shares}
        for across in (False, True):
            pairs = []
            for share, trainers in searches.items():
                fleets = search_engines(tried, share, across=across)
                if nearest is None or (fleets and not nearest[1]):
                    nearest = (trainers, fleets, ranks[share])
                pair = _join(tried, machine, trainers, fleets, ranks=ranks[share], overlap=overlap)
                if pair is not None:
                    pairs.append(pair)
            if pairs:
                return _simplest(pairs)
    assert nearest is not None
    trainers, fleets, num_ranks = nearest
    raise reasons.refusal(space, recipe, machine, trainers, fleets, num_ranks=num_ranks)


def _simplest(pairs: list[Pair]) -> Pair:
    """Of those about as fast as the fastest, the one that is cut least."""
    fastest = min(pair.step_s for pair in pairs)
    return min(
        (pair for pair in pairs if pair.step_s <= fastest * ALIKE),
        key=lambda pair: (pair.trainer.cuts, pair.engines.cuts, round(pair.step_s, 3)),
    )


def _shares(space: SearchSpace, num_devices: int) -> list[int]:
    """Devices of the engines."""
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
        f"split placement leaves {max(0, share)} devices for the trainer, which needs "
        f"{model_ranks}",
        why=f"{num_devices} devices - {shares[0]} for engines = {share}; tp x pp x cp = "
        f"{model_ranks}",
        fix=[
            "--set engines.placement=colocated",
            f"--set engines.num={max(1, (num_devices - model_ranks) // (pins.tp or 1))}",
        ],
    )


def _join(
    space: SearchSpace,
    machine: Machine,
    trainers: TrainerSearch,
    fleets: list[EngineChoice],
    *,
    ranks: int,
    overlap: bool,
) -> Pair | None:
    """The best pair that fits together, or None. Of trainers and of fleets, those about as fast as
    the fastest count as equally fast; slower fleets are tried where none of these fits."""
    fastest = alike(fleets[:_MANY])
    pairs = [
        _pair(space, trainer, engines, trainers, fleets, ranks=ranks, overlap=overlap)
        for engines in fastest
        if (trainer := _trainer_beside(engines, space, machine, trainers, ranks, overlap))
    ]
    if pairs:
        return _simplest(pairs)
    if len(fastest) == len(fleets):
        return None
    slower = fleets[len(fastest) :]
    return _join(space, machine, trainers, slower, ranks=ranks, overlap=overlap)


def _trainer_beside(
    engines: EngineChoice,
    space: SearchSpace,
    machine: Machine,
    trainers: TrainerSearch,
    ranks: int,
    overlap: bool,
) -> TrainerChoice | None:
    """The trainer that is cut least, of the fastest that fit beside these engines."""
    host = _HOST_SHARE * machine.nodes[0].memory_bytes
    fitting = [
        trainer
        for trainer in trainers.fitting
        if not (space.colocated and publishing_bytes(space, trainer, engines) > space.usable_bytes)
        and trainer.needs.host * min(space.devices_per_node, ranks) <= host
    ]
    beside = 0.0 if overlap else engines.seconds.total
    return min(
        alike(fitting, beside=beside), key=lambda choice: (choice.cuts, choice.rank), default=None
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
) -> Pair:
    shared = space.colocated
    receivers = None if shared else engines.layout.num * engines.layout.tp
    moved = trainer.needs.weights + trainer.needs.optimizer
    return Pair(
        space=space,
        trainer=trainer,
        engines=engines,
        trainers=trainers,
        fleets=fleets,
        trainer_devices=ranks,
        sync_s=space.time.sync(trainer.layout, space.work, num_receivers=receivers)
        if space.has_engines
        else 0.0,
        turn_s=space.time.turns(moved) * (shared + bool(space.load.teachers)),
        overlap=overlap and not shared,
    )


def publishing_bytes(space: SearchSpace, trainer: TrainerChoice, engines: EngineChoice) -> int:
    """Of a device that both share while weights are handed over: the trainer has shed gradients and
    optimizer, the engine has no cache yet."""
    buckets = 2 * space.work.bucket_bytes
    return (
        trainer.needs.weights
        + engines.needs.weights
        + buckets
        + space.reached.trainer_context
        + space.reached.asleep
    )


def engine_context(recipe: Recipe, facts: ModelFacts, pair: Pair) -> EngineChoice:
    """The engines with the context length that they are started with."""
    layout = replace(pair.engines.layout, context_length=context_length(recipe, facts))
    return replace(pair.engines, layout=layout)
