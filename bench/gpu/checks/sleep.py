"""Turns on one device: what a sleeping engine and a sleeping trainer give back, how long that
takes, and whether the engine says the same after it was woken and given its weights anew. A CPU
gives no memory back: there the orders are given, and nothing is measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

import torch
from lines import Bound, Line
from planning import size_of_weight, time_model
from rig import Burst, address_of, engine, engine_layout, fleet_of, generate, started
from shapes import write_model

from checks import Visit
from milescli.backends.megatron.worker import TrainerRank
from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.core.types import WeightVersion
from milescli.doctor.tiny_trainer import start_trainer, take_step
from milescli.models.base import WeightTable
from milescli.plan.memory import memory_model
from milescli.plan.static_memory import static_bytes

NOTHING = "a CPU gives no memory back"


def measure(visit: Visit) -> Iterator[Line]:
    """See the module."""
    folder, weights = write_model("qwen3-0.6b", visit)
    server = engine(visit, folder)
    free_before = _free(visit)
    with started(server):
        taken = free_before - _free(visit)
        trainer = start_trainer(folder, visit.device)
        trainer.connect_engines([address_of(server)])
        try:
            yield from asyncio.run(_turns(visit, fleet_of(server), trainer, weights, taken=taken))
        finally:
            trainer.close()


async def _turns(
    visit: Visit, fleet: SglangFleet, trainer: TrainerRank, weights: WeightTable, *, taken: int
) -> list[Line]:
    """The turns of one step of a colocated run, in their order."""
    length = 32 if visit.on_device else 8
    burst = Burst(num_requests=4, prompt_tokens=length, new_tokens=length, temperature=0.0)
    requests = burst.requests(weights.facts.vocab_size, seed=1)
    take = asyncio.to_thread
    try:
        await take(take_step, trainer)  # there are no moments before
        await take(trainer.publish, WeightVersion(1))
        before, _ = await generate(fleet, requests)
        await fleet.pause()
        if visit.on_device:
            torch.cuda.empty_cache()  # what is left then is what the trainer holds
        engine_freed, sleep_s = await _change(visit, fleet.sleep)
        trainer_freed, trainer_sleep_s = await _change(visit, lambda: take(trainer.sleep))
        trainer_taken, trainer_wake_s = await _change(visit, lambda: take(trainer.wake))
        await take(trainer.offload_optimizer_state)
        weights_taken, wake_s = await _change(visit, fleet.wake_weights)
        await take(trainer.publish, WeightVersion(2))
        await take(trainer.sleep)
        cache_taken, cache_s = await _change(visit, fleet.wake_cache)
        await fleet.resume(WeightVersion(2))
        after, _ = await generate(fleet, requests)
        await take(trainer.wake)
        await take(take_step, trainer)
    finally:
        await fleet.close()
    layout, times = engine_layout(visit), time_model(weights)
    planned = times.memory.engine(
        layout,
        memory_bytes=_total(visit),
        size=size_of_weight(visit),
        longest=layout.context_length,
        efficiency=times.efficiency,
    )
    same = [a.response_ids == b.response_ids for a, b in zip(before, after, strict=True)]
    return [
        _bytes(visit, "engine_freed", engine_freed, planned.weights + planned.cache, within=0.1),
        _bytes(visit, "engine_kept", taken - engine_freed, times.efficiency.asleep),
        _bytes(visit, "engine_returned", -(weights_taken + cache_taken), engine_freed, within=0.02),
        _bytes(visit, "trainer_freed", trainer_freed, _static(trainer), within=0.1),
        _bytes(visit, "trainer_returned", -trainer_taken, trainer_freed, within=0.05),
        _seconds(visit, "engine_sleep", sleep_s, engine_freed),
        _seconds(visit, "engine_wake", wake_s + cache_s, engine_freed),
        _seconds(visit, "trainer_sleep", trainer_sleep_s, trainer_freed),
        _seconds(visit, "trainer_wake", trainer_wake_s, trainer_freed),
        Line(
            name="same_tokens",
            measured=sum(same),
            predicted=len(same),
            unit="greedy responses equal to those before the sleep",
            bound=Bound(kind="equal"),
        ),
    ]


async def _change(visit: Visit, order: Callable[[], Awaitable[None]]) -> tuple[int, float]:
    """Bytes that an order gave back, and its seconds."""
    before, begun = _free(visit), time.perf_counter()
    await order()
    return _free(visit) - before, time.perf_counter() - begun


def _free(visit: Visit) -> int:
    """Of the device, whoever holds it."""
    if not visit.on_device:
        return 0
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def _total(visit: Visit) -> int:
    return torch.cuda.mem_get_info()[1] if visit.on_device else 2**30


def _static(trainer: TrainerRank) -> int:
    """Weights, gradients and moments of the trainer, by the planner."""
    layout = trainer.plan.trainer
    held = memory_model(trainer.facts).counter.fullest(layout)
    return sum(static_bytes(held, layout, size=trainer.dtype.itemsize))


def _bytes(
    visit: Visit, name: str, measured: int, predicted: int, *, within: float | None = None
) -> Line:
    return Line(
        name=name,
        measured=measured / 2**30 if visit.on_device else None,
        predicted=predicted / 2**30,
        unit="GiB",
        bound=Bound(kind="within", value=within, anywhere=False) if within else None,
        note="" if visit.on_device else NOTHING,
    )


def _seconds(visit: Visit, name: str, seconds: float, moved: int) -> Line:
    return Line(
        name=name,
        measured=seconds,
        unit="s",
        figures={"bytes_per_s": moved / seconds} if visit.on_device else {},
    )
