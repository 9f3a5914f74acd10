"""The loops of supervised steps. `learn` takes rows of a file: take, pack, step, save, measure; it
asks no engine for anything. `warm_up` imitates demonstrations before the first RL step."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from milescli.core.concurrency import in_thread
from milescli.core.events import EventBus, PhaseStarted, RowStepDone, WarmupStepDone
from milescli.core.types import StepReport, Trajectory
from milescli.data.examples import Examples
from milescli.plan.types import Plan
from milescli.recipe.schema import Recipe
from milescli.runtime.devices import Devices
from milescli.runtime.loop import MemoryReports
from milescli.runtime.recovery.supervise import StopFlag
from milescli.train.base import Objective, TrainBatch, Trainer, adapts
from milescli.train.objectives import load_objective, sequences_from
from milescli.train.optimizers import lr_at, warmup_lr_at
from milescli.train.packing import pack


@dataclass(slots=True, kw_only=True)
class RowHooks:
    """What the loop calls besides the algorithm; each is awaited and may raise."""

    save: Callable[[int], Awaitable[None]]
    """Write checkpoint `step`; may go on in the background."""
    between: Callable[[int], Awaitable[None]]
    """So many steps are done, and the next has not begun: a profile may begin or end."""
    measure: Callable[[int], Coroutine[Any, Any, None]]
    """Measure the weights of `step` on held-out rows and prompts."""
    tell: Callable[..., Awaitable[None]]
    """Call a hook of the user's by its name, `run.hooks.*`."""


@dataclass(slots=True, kw_only=True)
class RowRun:
    """A run in memory: everything that the loop works with."""

    recipe: Recipe
    plan: Plan
    bus: EventBus
    objective: Objective[Any]
    """Of the recipe's `train.objective`."""
    rows: Examples[Any]
    trainer: Trainer
    devices: Devices | None
    """None: there are no engines to take turns with."""
    hooks: RowHooks
    stop: StopFlag
    step: int = 0
    """Steps done."""
    memory: MemoryReports = field(default_factory=MemoryReports)


async def learn(run: RowRun) -> None:
    """The steps from `run.step` to the recipe's number of steps."""
    recipe, num_steps = run.recipe, run.recipe.train.steps
    run.bus.emit(PhaseStarted(phase="train", detail=f"steps {run.step + 1} to {num_steps}"))
    for step in range(run.step + 1, num_steps + 1):
        run.stop.check()
        await run.hooks.between(run.step)
        began = time.monotonic()
        rows = run.rows.take(recipe.train.batch_size)
        batch = await in_thread(lambda rows=rows: batch_of(run, rows))
        lr = await in_thread(lambda step=step: lr_at(recipe.train.optimizer, step - 1, num_steps))
        packed = time.monotonic()
        async with run.devices.training() if run.devices else nullcontext():
            stepped = await run.trainer.step(batch, lr=lr)
            report = stepped.report
            run.step = step
            if adapts(run.objective):
                await in_thread(lambda report=report: run.objective.observe(report))
            trained = time.monotonic()
            if due(step, recipe.checkpoint.every) or step == num_steps:
                await run.hooks.save(step)
        done = _step_done(run, report, began=began, packed=packed, trained=trained)
        run.memory.tell(run.bus, step=step, workers=stepped.memory)
        run.bus.emit(done)
        await run.hooks.tell("tracker", event=done)
        if due(step, recipe.eval.every) or step == num_steps:
            await run.stop.unless_set(run.hooks.measure(step))


def batch_of(run: RowRun, rows: list[Any]) -> TrainBatch:
    """Return what the objective learns from these rows, packed, one shard a data-parallel rank."""
    plan, name = run.plan, run.recipe.train.objective
    return pack(
        sequences_from(run.objective, rows, name=name),
        objective=name,
        dp=plan.trainer.dp,
        max_tokens_per_microbatch=plan.batch.max_row_tokens(plan.trainer.cp),
    )


def due(step: int, every: int) -> bool:
    """True if `step` is one of every so many; 0: never."""
    return every > 0 and step % every == 0


def _step_done(
    run: RowRun, report: StepReport, *, began: float, packed: float, trained: float
) -> RowStepDone:
    now = time.monotonic()
    return RowStepDone(
        step=run.step,
        num_steps=run.recipe.train.steps,
        epoch=run.rows.position / len(run.rows),
        report=report,
        pack_s=packed - began,
        train_s=trained - packed,
        save_s=now - trained,
        step_s=now - began,
        tokens_per_s=report.num_tokens / max(trained - packed, 1e-9),
    )


async def warm_up(
    *,
    recipe: Recipe,
    plan: Plan,
    trainer: Trainer,
    demonstrations: list[Trajectory],
    bus: EventBus,
    stop: StopFlag,
    tell: Callable[..., Awaitable[None]],
) -> None:
    """Supervised steps through the same trainer, which needs no engine; its optimizer state is
    forgotten afterwards."""
    settings = recipe.warmup
    bus.emit(PhaseStarted(phase="warmup", detail=f"{settings.steps} supervised steps"))
    batches = _supervised_batches(recipe, plan, demonstrations)
    for step in range(1, settings.steps + 1):
        stop.check()
        began = time.monotonic()
        lr = warmup_lr_at(settings, step - 1)
        report = (await trainer.step(next(batches), lr=lr)).report
        done = WarmupStepDone(
            step=step, num_steps=settings.steps, report=report, step_s=time.monotonic() - began
        )
        bus.emit(done)
        await tell("tracker", event=done)
    await trainer.reset_optimizer()


def _supervised_batches(
    recipe: Recipe, plan: Plan, demonstrations: list[Trajectory]
) -> Iterator[TrainBatch]:
    """Endless batches, in an order fixed by the run's seed."""
    size, name = recipe.warmup.batch_size, "supervised"
    objective = load_objective(name, recipe)
    rng, pool = random.Random(f"{recipe.run.seed}/warmup"), list[int]()
    while True:
        while len(pool) < size:
            fresh = list(range(len(demonstrations)))
            rng.shuffle(fresh)
            pool += fresh
        chosen = [demonstrations[index] for index in pool[:size]]
        pool = pool[size:]
        yield pack(
            sequences_from(objective, chosen, name=name),
            objective=name,
            dp=plan.trainer.dp,
            max_tokens_per_microbatch=plan.batch.max_row_tokens(plan.trainer.cp),
        )
