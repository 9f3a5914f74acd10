"""Layouts on accelerators: asks `search` for trainer and engines, puts the two together (taking
turns, or side by side), and says why. Called by `make`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from milescli import models
from milescli.core.errors import FitError
from milescli.core.units import GIB
from milescli.models.base import WeightTable
from milescli.models.facts import ModelFacts
from milescli.plan import reasons
from milescli.plan.activations import Packing
from milescli.plan.decisions import Log
from milescli.plan.devices import spec_of
from milescli.plan.legal import (
    IllegalValue,
    cp_faults,
    engine_faults,
    expert_faults,
    faults,
    stage_faults,
    tp_faults,
)
from milescli.plan.memory import TrainerWish, bucket_bytes, memory_model
from milescli.plan.on_cpu import context_length, longest_tokens
from milescli.plan.search import (
    ALIKE,
    EngineChoice,
    Question,
    TrainerChoice,
    TrainerSearch,
    alike_s,
    publishing_bytes,
    search_engines,
    search_trainer,
)
from milescli.plan.time import MEAN_SHARE, TimeModel, Work
from milescli.plan.types import TrainerLayout
from milescli.platform.machine import DEVICE_MODELS, Machine
from milescli.recipe.schema import Parallel, Recipe

_Choice = TypeVar("_Choice", TrainerChoice, EngineChoice)
_FINE_DEVICES = 64
"""Up to so many devices, splits are tried in eighths; beyond, in quarters."""
_MANY = 12
"""Fleets that are weighed against trainers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Trainer and engines that fit together."""

    question: Question
    trainer: TrainerChoice
    engines: EngineChoice
    searched: TrainerSearch
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
        return self.trainer.needs.host * min(self.question.devices_per_node, self.trainer_devices)


def plan_devices(
    recipe: Recipe,
    machine: Machine,
    facts: ModelFacts,
    *,
    devices_per_node: int,
    colocated: bool,
    size: int,
    log: Log,
) -> Answer:
    """The best trainer and engines on `devices_per_node` devices of each wanted node. Raises
    FitError with the equation where a pin is illegal, or nothing fits."""
    table = models.table(facts)
    question = ask(
        recipe, machine, table, devices_per_node=devices_per_node, colocated=colocated, size=size
    )
    num_devices = devices_per_node * recipe.machine.nodes
    _check_pins(recipe, facts, num_devices)
    answer = _best(
        question, machine, num_devices, overlap=recipe.rollout.max_staleness > 0, recipe=recipe
    )
    beside = 0.0 if answer.overlap else answer.engines.seconds.total
    reasons.explain(
        answer.question, answer.trainer, answer.searched, beside=beside, recipe=recipe, log=log
    )
    reasons.explain_engines(answer.question, answer.engines, answer.fleets, recipe=recipe, log=log)
    return answer


def ask(
    recipe: Recipe,
    machine: Machine,
    table: WeightTable,
    *,
    devices_per_node: int,
    colocated: bool,
    size: int,
) -> Question:
    """All that the search depends on."""
    device, _ = spec_of(machine)
    memory = memory_model(table.facts)
    memory_bytes = (
        machine.nodes[0].devices[0].memory_bytes or DEVICE_MODELS[device.name].memory_gib * GIB
    )
    bucket = bucket_bytes(recipe.weights.bucket_mib)
    rollout, train = recipe.rollout, recipe.train
    scores = bool(train.kl_coef) + (
        train.updates_per_step > 1 and train.old_logprobs != "engine" and not rollout.max_staleness
    )
    return Question(
        memory=memory,
        time=TimeModel(
            table=table, memory=memory, device=device, devices_per_node=devices_per_node
        ),
        work=Work(
            num_samples=rollout.prompts_per_step * rollout.samples_per_prompt,
            num_prompts=rollout.prompts_per_step,
            prompt_tokens=max(1.0, recipe.data.max_prompt_tokens * MEAN_SHARE),
            response_tokens=max(1.0, rollout.max_response_tokens * MEAN_SHARE),
            longest_response=rollout.max_response_tokens,
            updates=train.updates_per_step,
            extra_forwards=scores,
            size=size,
            bucket_bytes=bucket,
        ),
        wish=TrainerWish(
            size=size,
            row_tokens=0,
            num_microbatches=1,
            keeps_reference=bool(train.kl_coef),
            sleeps=colocated,
            bucket_bytes=bucket,
            packing=Packing(imbalance=train.expert_imbalance),
        ),
        memory_bytes=memory_bytes,
        devices_per_node=devices_per_node,
        longest=recipe.data.max_prompt_tokens + rollout.max_response_tokens,
        longest_served=longest_tokens(recipe),
        pins=recipe.parallel,
        engine_pins=recipe.engines,
        cap=train.max_tokens_per_microbatch,
        recompute=train.recompute,
        offload=train.optimizer.offload,
        colocated=colocated,
    )


def _check_pins(recipe: Recipe, facts: ModelFacts, num_devices: int) -> None:
    """Each pin by itself, before anything is weighed."""
    pins = recipe.parallel
    for fault in _pin_faults(pins, facts):
        raise fault.error()
    parts = (pins.tp or 1) * (pins.pp or 1) * (pins.cp or 1)
    if pins.dp is None and num_devices % parts and recipe.engines.placement != "split":
        raise FitError(
            f"tp x pp x cp = {pins.tp or 1} x {pins.pp or 1} x {pins.cp or 1} = {parts} does not "
            f"divide {num_devices} devices",
            why=f"{num_devices} / {parts} is not whole, so ranks would be left over",
            fix=f"--set parallel.dp={max(1, num_devices // parts)}   # leaves devices idle; or pin "
            "a layout that divides",
        )
    _check_engine_pins(recipe, facts, num_devices)


def _check_engine_pins(recipe: Recipe, facts: ModelFacts, num_devices: int) -> None:
    """They leave at least one size of engines."""
    pins, per_node = recipe.engines, num_devices // recipe.machine.nodes
    sizes = (
        [pins.tp]
        if pins.tp
        else [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    )
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
            f"an engine of {pins.tp} devices is pinned and there are {num_devices}",
            why=f"engines.tp {pins.tp} > {recipe.machine.nodes} nodes x {per_node} devices = "
            f"{num_devices}",
            fix=f"--set engines.tp={per_node}",
        )
    if pins.tp and recipe.machine.nodes > 1 and pins.tp % per_node and per_node % pins.tp:
        legal = max(
            size for size in range(1, per_node + 1) if per_node % size == 0 and size <= pins.tp
        )
        raise FitError(
            f"engines of {pins.tp} devices would lie across nodes",
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


def _best(
    question: Question, machine: Machine, num_devices: int, *, overlap: bool, recipe: Recipe
) -> Answer:
    """Engines span nodes only where none within a node will do, and the optimizer goes to the host
    only where neither helps."""
    asked = [question, replace(question, offload=True)] if question.offload is None else [question]
    shares = _shares(question, num_devices)
    tried: tuple[TrainerSearch, list[EngineChoice], int] | None = None
    for wish in asked:
        searches = {
            share: search_trainer(wish, num_devices if wish.colocated else num_devices - share)
            for share in shares
        }
        for across in (False, True):
            found = []
            for share, searched in searches.items():
                fleets = search_engines(wish, share, across=across)
                ranks = num_devices if wish.colocated else num_devices - share
                if tried is None or (fleets and not tried[1]):
                    tried = (searched, fleets, ranks)
                if answer := _join(wish, machine, searched, fleets, ranks=ranks, overlap=overlap):
                    found.append(answer)
            if found:
                return _simplest(found)
    assert tried is not None
    raise reasons.refusal(question, recipe, machine, tried[0], tried[1], num_ranks=tried[2])


def _simplest(found: list[Answer]) -> Answer:
    """Of those about as fast as the fastest, the one that is cut least."""
    fastest = min(answer.step_s for answer in found)
    return min(
        (answer for answer in found if answer.step_s <= fastest * ALIKE),
        key=lambda answer: (answer.trainer.cuts, answer.engines.cuts, round(answer.step_s, 3)),
    )


def _shares(question: Question, num_devices: int) -> list[int]:
    """Devices of the engines."""
    if question.colocated:
        return [num_devices]
    pins, per_node = question.engine_pins, question.devices_per_node
    model_ranks = (question.pins.tp or 1) * (question.pins.pp or 1) * (question.pins.cp or 1)
    if pins.num is not None:
        sizes = (
            [pins.tp]
            if pins.tp
            else [size for size in range(1, per_node + 1) if per_node % size == 0]
        )
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
        share for share in shares if num_devices - share >= model_ranks * (question.pins.dp or 1)
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
    question: Question,
    machine: Machine,
    searched: TrainerSearch,
    fleets: list[EngineChoice],
    *,
    ranks: int,
    overlap: bool,
) -> Answer | None:
    """The best pair that fits together, or None. Of each, those about as fast as the fastest are
    taken for alike: estimates are not better."""
    found: list[Answer] = []
    host = 0.9 * machine.nodes[0].memory_bytes
    for engines in alike(fleets[:_MANY]):
        trainers = [
            trainer
            for trainer in searched.fitting
            if not (
                question.colocated
                and publishing_bytes(question, trainer, engines) > question.usable_bytes
            )
            and trainer.needs.host * min(question.devices_per_node, ranks) <= host
        ]
        if not trainers:
            continue
        beside = 0.0 if overlap else engines.seconds.total
        trainer = min(alike(trainers, beside=beside), key=lambda choice: (choice.cuts, choice.rank))
        found.append(
            Answer(
                question=question,
                trainer=trainer,
                engines=engines,
                searched=searched,
                fleets=fleets,
                trainer_devices=ranks,
                sync_s=question.time.sync(
                    trainer.layout,
                    question.work,
                    num_receivers=None
                    if question.colocated
                    else engines.layout.num * engines.layout.tp,
                ),
                turn_s=question.time.turns(trainer.needs.weights + trainer.needs.optimizer)
                if question.colocated
                else 0.0,
                overlap=overlap and not question.colocated,
            )
        )
    if not found and len(alike(fleets[:_MANY])) < len(fleets):
        return _join(
            question,
            machine,
            searched,
            fleets[len(alike(fleets[:_MANY])) :],
            ranks=ranks,
            overlap=overlap,
        )
    return _simplest(found) if found else None


def alike(choices: list[_Choice], *, beside: float = 0.0) -> list[_Choice]:
    """Those about as fast as the first, which is the fastest; `beside`: seconds of a step that pass
    meanwhile or otherwise."""
    if not choices:
        return []
    most = alike_s(choices[0].seconds.total, beside=beside)
    return [each for each in choices if each.seconds.total <= most]


def engine_context(recipe: Recipe, facts: ModelFacts, answer: Answer) -> EngineChoice:
    """The engines with the context length that they are told."""
    layout = replace(answer.engines.layout, context_length=context_length(recipe, facts))
    return replace(answer.engines, layout=layout)
