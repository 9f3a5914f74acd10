"""Runs the training loop: take, train, publish. If its source returns groups that engines sample,
it is reinforcement learning; if it returns rows or demonstrations, supervised learning. Other
modules decide which process runs on which device."""

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
from milescli.train.base import Objective, StepResult, TrainBatch, Trainer, is_adaptive
from milescli.train.objectives import sequences_from
from milescli.train.packing import images_of, pack

MEMORY_CHANGED = 0.02
"""Relative change of a worker's memory after which it is reported again."""


@dataclass(slots=True)
class MemoryReports:
    """Reports the memory of ranks, engines and devices when it has changed: hundreds of ranks
    measure theirs at each step, and a run has thousands of steps. Belongs to one Run."""

    last: dict[str, WorkerMemory] = field(default_factory=dict)
    """The last report of each worker."""

    def report(self, bus: EventBus, *, step: int, workers: tuple[WorkerMemory, ...]) -> None:
        """Emit an event with the workers that are new, or whose memory has changed; none if there
        are none."""
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
    """Do nothing: the default of a hook that a run does not need."""


async def pack_here(run: Run, items: list[Any]) -> tuple[TrainBatch, dict[Place, int]]:
    """Pack in a thread of this process, which holds the items' tokens."""
    return await in_thread(lambda: packed(run, items))


@dataclass(slots=True, kw_only=True)
class Hooks:
    """Holds what the loop calls besides the algorithm; each hook is awaited and may raise."""

    between: Callable[[int], Awaitable[None]] = _nothing
    """Called between two steps, with the number of completed ones: a profile may begin or end."""
    taken: Callable[[int, list[Any]], Awaitable[None]] = _nothing
    """Called before the step is trained on these items."""
    pack: Callable[[Run, list[Any]], Awaitable[tuple[TrainBatch, dict[Place, int]]]] = pack_here
    """Returns `packed` of the items. If other processes hold the tokens, also fills in the items
    that are written to disk."""
    trained: Callable[[int, StepReport], Awaitable[None]] = _nothing
    """Called when the trainer has taken the step; nothing of it is saved or published yet."""
    save: Callable[[int], Awaitable[None]] = _nothing
    """Writes checkpoint `step`, and makes its weights the reference, if the recipe wants it; may
    continue in the background."""
    keep: Callable[[int, list[Any], TrainerLogprobs], Awaitable[None]] = _nothing
    """Writes a few samples to disk, for people to read; may continue in the background."""
    memory: Callable[[StepResult], tuple[WorkerMemory, ...]] = lambda _: ()
    """Returns the memory of the run's processes, as far as it is known."""
    done: Callable[[Any, list[Any]], Awaitable[None]] = _nothing
    """Called with the event of a step and its items, when the engines have its weights."""
    evaluate: Callable[[int], Coroutine[Any, Any, None]] = _nothing
    """Evaluates the weights of `step`, which the engines hold, if the recipe wants it."""


@dataclass(slots=True, kw_only=True)
class Run:
    """Holds everything that the loop works with."""

    plan: Plan
    bus: EventBus
    source: Source
    objective: Objective[Any]
    """The source's objective, loaded."""
    trainer: Trainer
    devices: Devices | None
    """None: there are no engines."""
    hooks: Hooks
    stop: StopFlag
    step: int = 0
    """Number of completed steps."""
    memory: MemoryReports = field(default_factory=MemoryReports)

    @property
    def version(self) -> WeightVersion:
        """Return the version of the engines' weights."""
        return self.devices.version if self.devices is not None else WeightVersion(0)

    def training(self) -> AbstractAsyncContextManager[None]:
        """Give the trainer its turn on the devices."""
        return self.devices.training() if self.devices is not None else nullcontext()


async def learn(run: Run) -> None:
    """Take the steps after `run.step` up to the last one of the source. If the source samples, the
    engines hold the weights of `run.step` at the start, and of each step after it."""
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
            source.on_published(run.version)
        clock.lap("publish")
        await hooks.keep(step, items, trainer_logprobs(shown, stepped.logprobs))
        run.memory.report(run.bus, step=step, workers=hooks.memory(stepped))
        run.bus.emit(event := source.step_done(step, report, clock.seconds(), run.devices))
        await hooks.done(event, items)
        await run.stop.unless_set(hooks.evaluate(step))


def packed(run: Run, items: list[Any]) -> tuple[TrainBatch, dict[Place, int]]:
    """Return the objective's sequences from these items, packed, one shard per data-parallel rank;
    and which sequences belong to the samples that are kept."""
    sequences = sequences_from(run.objective, items, name=run.source.objective)
    shown = run.source.shown(items, sequences)
    settings = packing_of(run, logprob_ids=set(shown.values()))
    return pack(sequences, images=images_of(items), **settings), shown


def packing_of(run: Run, *, logprob_ids: set[int]) -> dict[str, Any]:
    """Return the arguments of `packing.plan_shards` except the sequences. `logprob_ids`: sequences
    whose log-probs the step returns."""
    plan, source = run.plan, run.source
    return {
        "objective": source.objective,
        "dp": plan.trainer.dp,
        "max_tokens_per_microbatch": plan.batch.max_row_tokens(plan.trainer.cp),
        "updates": source.updates,
        "temperature": source.temperature,
        "logprob_ids": logprob_ids,
        "shares_prompts": plan.batch.shares_prompts,
    }


def _observe(run: Run, report: StepReport) -> None:
    """Report the step to an objective that changes from step to step."""
    if is_adaptive(run.objective):
        run.objective.observe(report)


class Clock:
    """Seconds per phase of one step."""

    def __init__(self) -> None:
        self.began = self.last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Attribute the time since the last lap to `name`."""
        now = time.monotonic()
        self.laps[name], self.last = now - self.last, now

    def seconds(self) -> PhaseSeconds:
        """Return the laps so far."""
        return PhaseSeconds(
            **{f"{name}_s": value for name, value in self.laps.items()},
            step_s=self.last - self.began,
        )
