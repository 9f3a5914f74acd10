"""Defines what the search for layouts depends on: model, devices, the work of a step, and the
recipe's pins. Pure; made by `on_devices`, read by `search`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from milescli import models
from milescli.core.units import GIB
from milescli.models.base import WeightTable
from milescli.models.costs import token_flops
from milescli.models.facts import ModelFacts
from milescli.plan.activations import Packing
from milescli.plan.collectors import choose_collectors, collecting_bytes
from milescli.plan.devices import Efficiency, efficiency_of, spec_of
from milescli.plan.memory import (
    FRAGMENTED_SHARE,
    MemoryModel,
    TrainerLoad,
    bucket_bytes,
    memory_of,
    publishes_merged,
)
from milescli.plan.on_cpu import longest_tokens
from milescli.plan.static_memory import recipe_load_fields
from milescli.plan.time import MEAN_SHARE, TimeModel, Work
from milescli.plan.transport import sent_copies, step_bytes, whole_reason
from milescli.plan.types import EngineLayout, Log
from milescli.platform.machine import DEVICE_MODELS, Machine
from milescli.recipe.schema import EngineSettings, Parallel, Recipe
from milescli.recipe.train import MATRIX_RULES


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """Holds everything that the search depends on; equal spaces give equal layouts."""

    memory: MemoryModel
    time: TimeModel
    work: Work
    load: TrainerLoad
    """Row and number of microbatches are set for each layout."""
    memory_bytes: int
    """Memory of one device."""
    devices_per_node: int
    longest: int
    """Tokens of the longest sequence that is trained on."""
    longest_served: int
    """Tokens of the longest sequence that an engine must hold: an evaluation's responses may be
    longer."""
    pins: Parallel
    engine_pins: EngineSettings
    cap: int | None
    """Pinned tokens of a microbatch."""
    recompute: str
    """auto, none or full"""
    offload: bool | None
    colocated: bool
    has_engines: bool
    stored_bytes: int
    """Bytes on the driver's node of a step's samples in the object store, and of collecting
    processes."""

    @property
    def facts(self) -> ModelFacts:
        """Return the facts of the model."""
        return self.memory.table.facts

    @property
    def usable_bytes(self) -> int:
        """Return the usable bytes of one device."""
        return int(self.memory_bytes * (1 - FRAGMENTED_SHARE))

    @property
    def trainer_budget(self) -> int:
        """Return the bytes that a trainer rank may use beside the process of a sleeping engine."""
        return self.usable_bytes - (self.efficiency.asleep if self.colocated else 0)

    @property
    def efficiency(self) -> Efficiency:
        """Return the efficiency constants of the devices, without CUDA graphs if the recipe
        disables them."""
        return self.time.efficiency


def _collecting(recipe: Recipe, machine: Machine) -> int:
    """Return the bytes of collecting processes on the driver's node, if every device had an
    engine."""
    num_devices = sum(len(node.devices) for node in machine.nodes)
    most = EngineLayout(num=num_devices * recipe.has_engines)
    count, nodes = choose_collectors(recipe, most, Log()), range(len(machine.nodes))
    return collecting_bytes(recipe, machine, count, nodes=nodes).get(0, 0)


def search_space(
    recipe: Recipe,
    machine: Machine,
    table: WeightTable,
    *,
    devices_per_node: int,
    colocated: bool,
    size: int,
    teachers: Sequence[ModelFacts] = (),
) -> SearchSpace:
    """Return the search space of a recipe on a machine."""
    device, _ = spec_of(machine)
    reaches = efficiency_of(device.name)
    if not recipe.engines.cuda_graphs:
        reaches = replace(reaches, engine_graphs=0)
    merged = publishes_merged(recipe, on_cpu=False, size=2)
    memory = memory_of(recipe, table.facts, merged=merged)
    memory_bytes = (
        machine.nodes[0].devices[0].memory_bytes or DEVICE_MODELS[device.name].memory_gib * GIB
    )
    longest_response = (
        recipe.longest_sequence if recipe.learns_from_rows else recipe.rollout.max_response_tokens
    )
    bucket = bucket_bytes(recipe.weights.bucket_mib, on_cpu=False)
    train, shared = recipe.train, colocated and recipe.has_engines
    scores_old = train.updates_per_step > 1 and recipe.old_logprobs == "trainer"
    # of a critic: its values before the step, and the three passes of its own update
    scores = recipe.keeps_reference + scores_old + 4 * recipe.has_critic
    return SearchSpace(
        memory=memory,
        time=TimeModel(
            table=table,
            memory=memory,
            device=device,
            devices_per_node=devices_per_node,
            efficiency=reaches,
        ),
        work=Work(
            num_samples=recipe.sequences_per_step,
            num_prompts=recipe.sequences_per_step // recipe.rollout.samples_per_prompt,
            prompt_tokens=max(1.0, (recipe.longest_sequence - longest_response) * MEAN_SHARE),
            response_tokens=max(1.0, longest_response * MEAN_SHARE),
            longest_response=longest_response,
            updates=train.updates_per_step,
            extra_forwards=scores
            + (0 if recipe.caches_teacher else teacher_passes(teachers, table)),
            size=size,
            bucket_bytes=bucket,
            sends_whole=whole_reason(recipe, memory) is not None,
            engines_apart=recipe.engines_apart,
        ),
        load=TrainerLoad(
            size=size,
            row_tokens=0,
            num_microbatches=1,
            keeps_reference=recipe.keeps_reference,
            critic="in_turn" if recipe.has_critic else "none",
            teachers=tuple(teachers),
            takes_copies=recipe.fault.copy_every > 0,
            saves_copy=recipe.checkpoint.async_save,
            sent_copies=sent_copies(recipe, memory, colocated=colocated),
            sleeps=shared,
            bucket_bytes=bucket,
            packing=Packing(imbalance=train.expert_imbalance, longest=recipe.longest_sequence),
            efficiency=reaches,
            **recipe_load_fields(recipe),
        ),
        memory_bytes=memory_bytes,
        devices_per_node=devices_per_node,
        longest=recipe.longest_sequence * recipe.sequences_per_row,
        longest_served=longest_tokens(recipe),
        pins=recipe.parallel,
        engine_pins=recipe.engines,
        cap=train.max_tokens_per_microbatch,
        recompute=train.recompute,
        offload=False if train.optimizer.rule in MATRIX_RULES else train.optimizer.offload,
        colocated=shared,
        has_engines=recipe.has_engines,
        stored_bytes=step_bytes(recipe, table.facts) + _collecting(recipe, machine),
    )


def teacher_passes(teachers: Sequence[ModelFacts], table: WeightTable) -> float:
    """Return the cost of the teachers in a step, as a number of forward passes of the policy over
    all tokens. Each teacher scores its own prompts, an equal share here."""
    own = token_flops(table).matmul
    return sum(token_flops(models.table(facts)).matmul / own for facts in teachers) / max(
        len(teachers), 1
    )


def values_to_try(pin: int | None, free: Iterable[int], *, most: int) -> list[int]:
    """Return the values to try on one axis: the pinned value alone, or the values of `free` up to
    `most`."""
    return [pin] if pin is not None else [value for value in free if value <= most]


def divisors(number: int) -> list[int]:
    """Return all divisors of the number in ascending order."""
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})
