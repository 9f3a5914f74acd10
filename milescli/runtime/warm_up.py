"""The warm-up: supervised steps on demonstrations, before a run learns what it is for."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterator

from milescli.core.events import EventBus, PhaseStarted, WarmupStepDone
from milescli.core.types import Trajectory
from milescli.plan.types import Plan
from milescli.recipe.schema import Recipe
from milescli.runtime.stop_flag import StopFlag
from milescli.train.base import TrainBatch, Trainer
from milescli.train.objectives import load_objective, sequences_from
from milescli.train.optimizers import warmup_lr_at
from milescli.train.packing import pack


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
