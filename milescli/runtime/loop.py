"""THE loop: take, train, publish. Where its source gives groups that engines sample, it is
reinforcement learning; where it gives rows or demonstrations, supervised learning. Others decide
who runs where."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from milescli.core.concurrency import in_thread
from milescli.core.events import EventBus, MemorySeen, PhaseSeconds, PhaseStarted, WorkerMemory
from milescli.core.types import StepReport, WeightVersion
from milescli.plan.types import Plan
from milescli.runtime.devices import Devices
from milescli.runtime.recording.sample_files import Place, TrainerLogprobs, trainer_logprobs
from milescli.runtime.recovery.supervise import StopFlag
from milescli.runtime.sources import Source
from milescli.train.base import Objective, Stepped, TrainBatch, Trainer, adapts
from milescli.train.objectives import sequences_from
from milescli.train.packing import images_of, pack

MEMORY_CHANGED = 0.02
"""Share by which a worker's memory must change to be reported again."""


@dataclass(slots=True)
class MemoryReports:
    """Reports the memory of ranks, engines and devices where it has changed: hundreds of ranks
    measure theirs at each step, and a run has thousands of steps. Belongs to one run in memory."""

    last: dict[str, WorkerMemory] = field(default_factory=dict)
    """The last report of each worker."""

    def report(self, bus: EventBus, *, step: int, workers: tuple[WorkerMemory, ...]) -> None:
        """Emit an event of the workers that are new, or hold another amount than was reported;
        nothing where there are none."""
        news = tuple(one for one in workers if _differs(one, self.last.get(one.worker)))
        if news:
            self.last |= {one.worker: one for one in news}
            bus.emit(MemorySeen(step=step, workers=news))


def _differs(now: WorkerMemory, before: WorkerMemory | None) -> bool:
    if before is None or now.device != before.device:
        return True
    pairs = (
        (now.peak_bytes, before.peak_bytes),
        (now.reserved_bytes or 0, before.reserved_bytes or 0),
        (now.used_bytes or 0, before.used_bytes or 0),
    )
    return any(abs(one - other) > MEMORY_CHANGED * other for one, other in pairs)


async def _nothing(*_: object, **__: object) -> None:
    """Stands for a hook that a run does not need."""


async def pack_here(run: Run, items: list[Any]) -> tuple[TrainBatch, dict[Place, int]]:
    """Pack in a thread of this process, which has the items with their tokens."""
    return await in_thread(lambda: packed(run, items))


@dataclass(slots=True, kw_only=True)
class Hooks:
    """What the loop calls besides the algorithm; each is awaited and may raise."""

    between: Callable[[int], Awaitable[None]] = _nothing
    """So many steps are done, and the next has not begun: a profile may begin or end."""
    taken: Callable[[int, list[Any]], Awaitable[None]] = _nothing
    """The step will be trained on these items."""
    pack: Callable[[Run, list[Any]], Awaitable[tuple[TrainBatch, dict[Place, int]]]] = pack_here
    """Return what `packed` returns of the items; puts those in their place that are written to
    disk, where others have their tokens."""
    trained: Callable[[int, StepReport], Awaitable[None]] = _nothing
    """The trainer took the step; nothing of it is saved or published yet."""
    save: Callable[[int], Awaitable[None]] = _nothing
    """Write checkpoint `step`, and let its weights be the reference, where the recipe wants it;
    may go on in the background."""
    keep: Callable[[int, list[Any], TrainerLogprobs], Awaitable[None]] = _nothing
    """Write a few samples to disk, for people to read; may go on in the background."""
    memory: Callable[[Stepped], tuple[WorkerMemory, ...]] = lambda _: ()
    """Return what the run's processes hold, as far as it is known."""
    done: Callable[[Any, list[Any]], Awaitable[None]] = _nothing
    """The step that the event reports was trained on these items, and the engines have its
    weights."""
    evaluate: Callable[[int], Coroutine[Any, Any, None]] = _nothing
    """Measure the weights of `step`, which the engines hold, where the recipe wants it."""


@dataclass(slots=True, kw_only=True)
class Run:
    """Holds a run in memory: everything that the loop works with."""

    plan: Plan
    bus: EventBus
    source: Source
    objective: Objective[Any]
    """What the source says, loaded."""
    trainer: Trainer
    devices: Devices | None
    """None: there are no engines to take turns with."""
    hooks: Hooks
    stop: StopFlag
    step: int = 0
    """Steps done."""
    memory: MemoryReports = field(default_factory=MemoryReports)

    @property
    def version(self) -> WeightVersion:
        """The weights that the engines hold."""
        return self.devices.version if self.devices is not None else WeightVersion(0)

    def training(self) -> AbstractAsyncContextManager[None]:
        """Give the trainer its turn on the devices."""
        return self.devices.training() if self.devices is not None else nullcontext()


async def learn(run: Run) -> None:
    """The steps from `run.step` to the last one of the source. Where the source samples, the
    engines hold the weights of `run.step` at the beginning, and of each step after it."""
    source, hooks = run.source, run.hooks
    run.bus.emit(PhaseStarted(phase=source.phase, detail=source.detail(run.step)))
    source.start(run.step, version=run.version)
    for step in range(run.step + 1, source.num_steps + 1):
        run.stop.check()
        await hooks.between(run.step)
        clock = Clock()
        items = await run.stop.unless_set(source.take(step, version=run.version))
        clock.lap("rollout")
        await hooks.taken(step, items)
        batch, shown = await hooks.pack(run, items)
        lr, critic_lr = await in_thread(lambda step=step: source.rates(step))
        clock.lap("pack")
        async with run.training():
            stepped = await run.trainer.step(batch, lr=lr, critic_lr=critic_lr)
            report = stepped.report
            await hooks.trained(step, report)
            run.step = step
            await in_thread(lambda report=report: _observe(run, report))
            clock.lap("train")
            await hooks.save(step)
            clock.lap("save")
        if source.samples and run.devices is not None:
            verify = source.recipe.weights.verify
            await run.devices.publish(WeightVersion(run.version + 1), verify=verify)
            source.published(run.version)
        clock.lap("publish")
        await hooks.keep(step, items, trainer_logprobs(shown, stepped.logprobs))
        run.memory.report(run.bus, step=step, workers=hooks.memory(stepped))
        run.bus.emit(event := source.step_done(step, report, clock.seconds(), run.devices))
        await hooks.done(event, items)
        await run.stop.unless_set(hooks.evaluate(step))


def packed(run: Run, items: list[Any]) -> tuple[TrainBatch, dict[Place, int]]:
    """Return what the objective learns from these items, packed, one shard a data-parallel rank;
    and which sequences belong to the samples that are kept."""
    sequences = sequences_from(run.objective, items, name=run.source.objective)
    shown = run.source.shown(items, sequences)
    settings = packing_of(run, asked=set(shown.values()))
    return pack(sequences, images=images_of(items), **settings), shown


def packing_of(run: Run, *, asked: set[int]) -> dict[str, Any]:
    """Return the arguments of `packing.lay_out` but the sequences. `asked`: those whose log-probs
    the step returns."""
    plan, source = run.plan, run.source
    return {
        "objective": source.objective,
        "dp": plan.trainer.dp,
        "max_tokens_per_microbatch": plan.batch.max_row_tokens(plan.trainer.cp),
        "updates": source.updates,
        "temperature": source.temperature,
        "asked": asked,
        "shares_prompts": plan.batch.shares_prompts,
    }


def _observe(run: Run, report: StepReport) -> None:
    """Tell an objective that changes from step to step what the step did."""
    if adapts(run.objective):
        run.objective.observe(report)


class Clock:
    """Seconds per phase of one step."""

    def __init__(self) -> None:
        self.began = self.last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """What has passed since the last lap belongs to `name`."""
        now = time.monotonic()
        self.laps[name], self.last = now - self.last, now

    def seconds(self) -> PhaseSeconds:
        """Return the laps so far."""
        return PhaseSeconds(
            **{f"{name}_s": value for name, value in self.laps.items()},
            step_s=self.last - self.began,
        )
