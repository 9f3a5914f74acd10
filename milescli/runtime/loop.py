"""THE loop: reinforcement learning. It reads as the algorithm does; others decide who runs
where."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from milescli.core.concurrency import in_thread
from milescli.core.events import (
    EventBus,
    FlowStats,
    MemorySeen,
    PhaseSeconds,
    PhaseStarted,
    RolloutStats,
    StepDone,
    WorkerMemory,
)
from milescli.core.types import Group, StepReport, WeightVersion
from milescli.plan.types import Plan
from milescli.recipe.schema import Recipe
from milescli.rollout.collect.selectors import Tried
from milescli.runtime.devices import Devices
from milescli.runtime.recording.sample_files import (
    Place,
    TrainerLogprobs,
    sequences_of,
    trainer_logprobs,
)
from milescli.runtime.recovery.supervise import StopFlag
from milescli.train.base import Objective, TrainBatch, Trainer, adapts
from milescli.train.objectives import sequences_from
from milescli.train.optimizers import lr_at
from milescli.train.packing import pack

MEMORY_CHANGED = 0.02
"""Share of what was told last that is news."""


@dataclass(slots=True)
class MemoryReports:
    """Reports the memory of ranks, engines and devices where it has changed: hundreds of ranks say
    at each step what they hold, and a run has thousands of steps. Belongs to one run in memory."""

    told: dict[str, WorkerMemory] = field(default_factory=dict)
    """The last of each worker."""

    def tell(self, bus: EventBus, *, step: int, workers: tuple[WorkerMemory, ...]) -> None:
        """Emit an event of the workers that are new, or hold another amount than was reported;
        nothing where there are none."""
        news = tuple(one for one in workers if _differs(one, self.told.get(one.worker)))
        if news:
            self.told |= {one.worker: one for one in news}
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


T = TypeVar("T")


class GroupSource(Protocol):
    """Where the loop takes groups from: the strict form, and those that run ahead; see
    `rollout.ahead.open_collector`."""

    @property
    def stats(self) -> RolloutStats:
        """Statistics of the last step that `take` returned."""
        ...

    @property
    def refused(self) -> list[Group]:
        """Groups that the filter refused in the last step that `take` returned."""
        ...

    @property
    def position(self) -> int:
        """Position of the oldest prompt that no step has taken: where a resumed run goes on."""
        ...

    @property
    def taken(self) -> list[int]:
        """Positions of prompts behind `position` that steps have taken."""
        ...

    @property
    def flow(self) -> FlowStats:
        """How rollout kept up with the steps, up to the last one taken."""
        ...

    @property
    def history(self) -> dict[int, Tried]:
        """Results of earlier tries of each prompt, by its index, for a curriculum."""
        ...

    def start(self, *, version: WeightVersion, first_step: int, last_step: int) -> None:
        """Begin; the engines hold `version`, at which `first_step` will be trained."""

    def published(self, version: WeightVersion) -> None:
        """The engines hold `version` now: what waits for it may begin."""

    async def take(self, step: int, *, version: WeightVersion) -> list[Group]:
        """Return one step's groups, scored and filtered, in prompt order; `version` is the
        trainer's."""
        ...

    async def stop(self) -> None:
        """End what runs ahead."""


@dataclass(slots=True, kw_only=True)
class Hooks:
    """What the loop calls besides the algorithm; each is awaited and may raise."""

    save: Callable[[int], Awaitable[None]]
    """Write checkpoint `step`; may go on in the background."""
    evaluate: Callable[[int], Coroutine[Any, Any, None]]
    """Evaluate with the engines, which hold the weights of `step`."""
    between: Callable[[int], Awaitable[None]]
    """So many steps are done, and the next has not begun: a profile may begin or end."""
    keep: Callable[[int, list[Group], TrainerLogprobs], Awaitable[None]]
    """Write a few samples to disk, to read; may go on in the background."""
    memory: Callable[[], tuple[WorkerMemory, ...]]
    """What processes beside the trainer's hold, as far as it is known."""
    tell: Callable[..., Awaitable[None]]
    """Call a hook of the user's by its name, `run.hooks.*`."""


@dataclass(slots=True, kw_only=True)
class Run:
    """A run in memory: everything that the loop works with."""

    recipe: Recipe
    plan: Plan
    bus: EventBus
    objective: Objective[Group]
    """Of the recipe's `train.objective`."""
    groups: GroupSource
    trainer: Trainer
    devices: Devices
    hooks: Hooks
    step: int = 0
    """RL steps done."""
    stop: StopFlag
    memory: MemoryReports = field(default_factory=MemoryReports)


async def reinforce(run: Run) -> None:
    """The RL steps from `run.step` to the recipe's number of steps. Engines hold the weights of
    `run.step` when it begins."""
    recipe, num_steps = run.recipe, run.recipe.train.steps
    run.bus.emit(PhaseStarted(phase="train", detail=f"steps {run.step + 1} to {num_steps}"))
    run.groups.start(version=run.devices.version, first_step=run.step + 1, last_step=num_steps)
    for step in range(run.step + 1, num_steps + 1):
        run.stop.check()
        await run.hooks.between(run.step)
        clock = _Clock()
        groups = await run.stop.unless_set(run.groups.take(step, version=run.devices.version))
        clock.lap("rollout")
        await run.hooks.tell("all_samples", step=step, groups=groups, refused=run.groups.refused)
        await run.hooks.tell("before_step", step=step, groups=groups)
        batch, shown = await in_thread(lambda groups=groups: _prepare(run, groups))
        lr, critic_lr = await in_thread(lambda step=step: _lrs_of(run, step))
        clock.lap("pack")
        async with run.devices.training():
            stepped = await run.trainer.step(batch, lr=lr, critic_lr=critic_lr)
            report = stepped.report
            run.step = step
            await in_thread(lambda report=report: _observe(run, report))
            clock.lap("train")
            if _due(step, recipe.train.reference_every):
                await run.trainer.freeze_reference()
                await run.hooks.save(step)
            elif _due(step, recipe.checkpoint.every) or step == num_steps:
                await run.hooks.save(step)
            clock.lap("save")
        await run.devices.publish(
            WeightVersion(run.devices.version + 1), verify=recipe.weights.verify
        )
        run.groups.published(run.devices.version)
        clock.lap("publish")
        await run.hooks.keep(step, groups, trainer_logprobs(shown, stepped.logprobs))
        run.memory.tell(run.bus, step=step, workers=stepped.memory + run.hooks.memory())
        run.bus.emit(done := _step_done(run, report, clock))
        await run.hooks.tell("after_step", step=step, report=report, groups=groups)
        await run.hooks.tell("tracker", event=done)
        if _due(step, recipe.eval.every) or step == num_steps:
            await run.stop.unless_set(run.hooks.evaluate(step))


def _prepare(run: Run, groups: list[Group]) -> tuple[TrainBatch, dict[Place, int]]:
    """Return what the objective learns from these groups, packed, one shard a data-parallel rank;
    and which sequences belong to the samples that are kept."""
    plan, settings = run.plan, run.recipe.train
    sequences = sequences_from(run.objective, groups, name=settings.objective)
    shown = sequences_of(groups[: run.recipe.run.keep_groups], sequences)
    batch = pack(
        sequences,
        objective=settings.objective,
        dp=plan.trainer.dp,
        max_tokens_per_microbatch=plan.batch.max_row_tokens(plan.trainer.cp),
        updates=settings.updates_per_step,
        temperature=run.recipe.rollout.temperature,
        asked=set(shown.values()),
    )
    return batch, shown


def _observe(run: Run, report: StepReport) -> None:
    """Tell an objective that changes from step to step what the step did."""
    if adapts(run.objective):
        run.objective.observe(report)


def _lrs_of(run: Run, step: int) -> tuple[float | None, float | None]:
    """Return the learning rates of `step`: of the policy (None: the critic learns alone), and of
    the critic (None: there is none)."""
    train = run.recipe.train
    lr = lr_at(train.optimizer, step - 1, train.steps)
    if not run.recipe.has_critic:
        return lr, None
    own = train.optimizer.model_copy(update={"lr": train.critic.lr, "min_lr": 0.0})
    critic_lr = lr_at(own, step - 1, train.steps)
    return (None if step <= train.critic.warmup_steps else lr), critic_lr


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class _Clock:
    """Seconds per phase of one step."""

    def __init__(self) -> None:
        self.began = self.last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name], self.last = now - self.last, now

    def seconds(self) -> PhaseSeconds:
        return PhaseSeconds(
            **{f"{name}_s": value for name, value in self.laps.items()},
            step_s=self.last - self.began,
        )


def _step_done(run: Run, report: StepReport, clock: _Clock) -> StepDone:
    seconds = clock.seconds()
    return StepDone(
        step=run.step,
        num_steps=run.recipe.train.steps,
        report=report,
        rollout=run.groups.stats,
        seconds=seconds,
        version=run.devices.version,
        rollout_tokens_per_s=run.groups.stats.generated_tokens / max(seconds.rollout_s, 1e-9),
        train_tokens_per_s=report.num_tokens / max(seconds.train_s, 1e-9),
        publish=run.devices.interrupted,
        flow=run.groups.flow,
    )
