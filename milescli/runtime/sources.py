"""Defines what a run learns from: groups that engines sample, rows of files, or demonstrations
before the first RL step. Each source defines the items of a step, its learning rate, and its
report; `loop` runs the steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from milescli.core.events import PhaseSeconds, RowStepDone, StepDone, WarmupStepDone
from milescli.core.types import Group, StepReport, Trajectory, WeightVersion
from milescli.data.examples import Examples
from milescli.recipe.schema import Recipe
from milescli.rollout.collect.collector import Collector
from milescli.rollout.collect.completion_order import CompletionOrderCollector
from milescli.rollout.collect.prefetching import PrefetchingCollector
from milescli.rollout.collect.selectors import history_to_state
from milescli.runtime.devices import Devices
from milescli.runtime.recording.sample_files import Place, sequences_of
from milescli.runtime.saving import Progress
from milescli.train.base import TrainSequence
from milescli.train.optimizers import lr_at, warmup_lr_at

AnyCollector = Collector | PrefetchingCollector | CompletionOrderCollector
"""Made by `rollout.collect.prefetching.open_collector`."""
Rates = tuple[float | None, float | None]
"""Learning rates of the policy (None: it does not change), and of the critic (None: there is none,
or it does not change)."""


class Source:
    """Supplies the items of supervised steps, with the settings of the recipe's `train`: the base
    class."""

    phase = "train"
    """Phase of the steps, as an event names it."""
    samples = False
    """True if engines sample the items, with the weights of the step before."""
    updates = 1
    """Optimizer updates per step."""
    temperature = 1.0
    """Temperature at which the items were sampled."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.num_steps = recipe.train.steps
        self.objective = recipe.train.objective
        """Name of the objective that learns from the items."""

    def detail(self, step: int) -> str:
        """Return a description of the steps after `step`."""
        return f"steps {step + 1} to {self.num_steps}"

    def start(self, step: int, *, version: WeightVersion) -> None:
        """Start after `step` steps; the engines hold `version`, the weights of that step."""

    async def take(self, step: int, *, version: WeightVersion) -> list[Any]:
        """Return the items that `step` learns from; `version` is the trainer's."""
        raise NotImplementedError

    def on_published(self, version: WeightVersion) -> None:
        """Record that the engines hold `version`, so that items that wait for these weights can be
        sampled."""

    def shown(self, items: list[Any], sequences: Sequence[TrainSequence]) -> dict[Place, int]:
        """Return place -> sequence for the sequences whose trainer log-probs are written to
        disk."""
        return {}

    def rates(self, step: int) -> Rates:
        """Return the learning rates of `step`."""
        return lr_at(self.recipe.train.optimizer, step - 1, self.num_steps), None

    def step_done(
        self, step: int, report: StepReport, seconds: PhaseSeconds, devices: Devices | None
    ) -> Any:
        """Return the event that reports the step."""
        raise NotImplementedError

    def progress(self) -> Progress:
        """Return what a checkpoint records of the source."""
        return Progress()

    async def stop(self) -> None:
        """Stop the tasks that run ahead of the steps."""


class Groups(Source):
    """Supplies groups of samples, which engines generate from prompts: reinforcement learning."""

    samples = True

    def __init__(self, recipe: Recipe, collector: AnyCollector) -> None:
        super().__init__(recipe)
        self.collector = collector
        self.updates = recipe.train.updates_per_step
        self.temperature = recipe.rollout.temperature

    def start(self, step: int, *, version: WeightVersion) -> None:
        self.collector.start(version=version, first_step=step + 1, last_step=self.num_steps)

    async def take(self, step: int, *, version: WeightVersion) -> list[Group]:
        return await self.collector.take(step, version=version)

    def on_published(self, version: WeightVersion) -> None:
        self.collector.on_published(version)

    def shown(self, items: list[Group], sequences: Sequence[TrainSequence]) -> dict[Place, int]:
        return sequences_of(items[: self.recipe.run.keep_groups], sequences)

    def rates(self, step: int) -> Rates:
        lr, _ = super().rates(step)
        if not self.recipe.has_critic:
            return lr, None
        critic = self.recipe.train.critic
        own = self.recipe.train.optimizer.model_copy(update={"lr": critic.lr, "min_lr": 0.0})
        critic_lr = lr_at(own, step - 1, self.num_steps)
        return (None if step <= critic.warmup_steps else lr), critic_lr

    def step_done(
        self, step: int, report: StepReport, seconds: PhaseSeconds, devices: Devices | None
    ) -> StepDone:
        assert devices is not None, "nothing is sampled without engines"
        stats = self.collector.stats
        return StepDone(
            step=step,
            num_steps=self.num_steps,
            report=report,
            rollout=stats,
            seconds=seconds,
            version=devices.version,
            rollout_tokens_per_s=stats.generated_tokens / max(seconds.rollout_s, 1e-9),
            train_tokens_per_s=report.num_tokens / max(seconds.train_s, 1e-9),
            publish=replace(devices.interrupted, sent_bytes=devices.sent_bytes),
            flow=self.collector.flow,
        )

    def progress(self) -> Progress:
        return Progress(
            prompt_position=self.collector.position,
            taken=self.collector.taken,
            curriculum=history_to_state(self.collector.history),
        )

    async def stop(self) -> None:
        await self.collector.stop()


class Rows(Source):
    """Supplies rows of files, in their order."""

    def __init__(self, recipe: Recipe, rows: Examples[Any]) -> None:
        super().__init__(recipe)
        self.rows = rows

    async def take(self, step: int, *, version: WeightVersion) -> list[Any]:
        return self.rows.take(self.recipe.train.batch_size)

    def step_done(
        self, step: int, report: StepReport, seconds: PhaseSeconds, devices: Devices | None
    ) -> RowStepDone:
        return RowStepDone(
            step=step,
            num_steps=self.num_steps,
            epoch=self.rows.position / len(self.rows),
            report=report,
            pack_s=seconds.rollout_s + seconds.pack_s,
            train_s=seconds.train_s,
            save_s=seconds.save_s,
            step_s=seconds.step_s,
            tokens_per_s=report.num_tokens / max(seconds.train_s, 1e-9),
        )

    def progress(self) -> Progress:
        return Progress(prompt_position=self.rows.position)


class Demonstrations(Source):
    """Supplies demonstrations, in an order fixed by the run's seed: the warm-up, with the settings
    of the recipe's `warmup`."""

    phase = "warmup"

    def __init__(self, recipe: Recipe, demonstrations: Sequence[Trajectory]) -> None:
        super().__init__(recipe)
        self.num_steps, self.objective = recipe.warmup.steps, "supervised"
        self._all, self._pool = demonstrations, list[int]()
        self._random = random.Random(f"{recipe.run.seed}/warmup")

    def detail(self, step: int) -> str:
        return f"{self.num_steps - step} supervised steps"

    def start(self, step: int, *, version: WeightVersion) -> None:
        for _ in range(step):
            self._draw()

    async def take(self, step: int, *, version: WeightVersion) -> list[Trajectory]:
        return self._draw()

    def _draw(self) -> list[Trajectory]:
        size = self.recipe.warmup.batch_size
        while len(self._pool) < size:
            fresh = list(range(len(self._all)))
            self._random.shuffle(fresh)
            self._pool += fresh
        taken, self._pool = self._pool[:size], self._pool[size:]
        return [self._all[index] for index in taken]

    def rates(self, step: int) -> Rates:
        return warmup_lr_at(self.recipe.warmup, step - 1), None

    def step_done(
        self, step: int, report: StepReport, seconds: PhaseSeconds, devices: Devices | None
    ) -> WarmupStepDone:
        return WarmupStepDone(
            step=step, num_steps=self.num_steps, report=report, step_s=seconds.step_s
        )
