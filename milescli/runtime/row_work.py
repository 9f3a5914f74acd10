"""Trains on rows of a file: first computes what frozen models predict for the rows, then runs the
loop; also evaluates held-out rows, and lets engines answer held-out prompts."""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.conversion.base import fingerprint
from milescli.core.concurrency import in_thread
from milescli.core.events import PhaseStarted, ValidationDone
from milescli.core.types import ROLLOUT
from milescli.runtime.evaluation.evaluator import Evaluator
from milescli.runtime.inputs.auxiliary_models import served_teachers
from milescli.runtime.inputs.episode_parts import episode_parts
from milescli.runtime.inputs.row_caches import ReferenceCache, TeacherCache
from milescli.runtime.loop import Run, learn, packed
from milescli.runtime.saving import version_of
from milescli.runtime.sources import Rows
from milescli.train.base import Trainer

if TYPE_CHECKING:
    from milescli.runtime.training import Training


class RowWork:
    """Trains on the rows of a run."""

    def __init__(self, training: Training) -> None:
        self.training, self.attempt = training, training.attempt
        self.spec, self.bus = training.spec, training.bus
        self.evaluator: Evaluator | None = None

    @property
    def asks_teachers(self) -> bool:
        """Return False if the cache has all predictions of the teachers, or the teachers are
        served."""
        if self.spec.recipe.train.distill.is_served:
            return False
        return not self.spec.recipe.caches_teacher or bool(self._teacher.missing(self._rows))

    @property
    def _rows(self) -> list[Any]:
        """Return all rows that the run trains on or measures."""
        inputs, train = self.spec.inputs, self.spec.recipe.train
        assert inputs.rows is not None, "a run that learns from rows has them"
        return [*inputs.rows.first(train.steps * train.batch_size), *inputs.validation]

    @cached_property
    def _teacher(self) -> TeacherCache:
        recipe, inputs = self.spec.recipe, self.spec.inputs
        served = served_teachers(recipe)
        return TeacherCache(
            self.spec.run.path / "teacher",
            marks=[*(fingerprint(folder, {}) for folder in inputs.teacher_dirs), *inputs.served],
            topk=recipe.train.distill.top_k,
            served=served and served.teachers[0].score_all,
        )

    async def prepare(self, trainer: Trainer) -> None:
        """Add the predictions of their teacher to the rows, then release the teacher; also add the
        rows' log-probs under the initial weights. The trainer holds these weights, or loads them
        here if the run is resumed."""
        recipe, path = self.spec.recipe, self.spec.run.path
        if recipe.caches_teacher:
            detail = "the teacher scores the rows"
            await self._fill(self._teacher, trainer, phase="teacher", detail=detail)
            await trainer.free_teachers()
        if recipe.caches_reference:
            if self.spec.checkpoint is not None:
                start = await in_thread(lambda: self.training.saver.store.find(0))
                await trainer.load(start.path, weights_only=True)
            detail = "the initial weights score the pairs"
            cache = ReferenceCache(path / "reference")
            await self._fill(cache, trainer, phase="reference", detail=detail)

    async def _fill(
        self, cache: ReferenceCache | TeacherCache, trainer: Trainer, *, phase: str, detail: str
    ) -> None:
        """Add the cached numbers to the rows; the trainer's ranks compute those that are
        missing."""
        inputs = self.spec.inputs
        assert inputs.rows is not None, "a run that learns from rows has them"
        if missing := cache.missing(self._rows):
            self.bus.emit(PhaseStarted(phase=phase, detail=f"{len(missing)} {detail}"))
            plan, stop = self.spec.plan, self.attempt.stop
            await cache.add(missing, trainer=trainer, plan=plan, stop=stop)
        inputs.rows.items = [cache.with_numbers(row) for row in inputs.rows.items]
        inputs.validation[:] = [cache.with_numbers(row) for row in inputs.validation]

    async def learn(self, trainer: Trainer, fleet: SglangFleet | None) -> None:
        """Take the steps to the last one."""
        run = self.training.run = self._run(trainer, fleet)
        if fleet is not None and run.devices is not None:
            self.attempt.keep_engines(fleet, ROLLOUT, join=run.devices.replace)
        if self.spec.checkpoint is None:
            await self.training.save(0)
        if run.step == 0:  # also of a run that died between its first checkpoint and here
            await self.attempt.stop.unless_set(self.evaluate(0))
        await learn(run)

    def _run(self, trainer: Trainer, fleet: SglangFleet | None) -> Run:
        """Return the Run for the loop."""
        spec, training, devices = self.spec, self.training, None
        assert spec.inputs.rows is not None, "a run that learns from rows has them"
        if spec.checkpoint is not None:
            spec.inputs.rows.position = spec.checkpoint.manifest.prompt_position
        if fleet is not None:
            devices = self.attempt.devices_of(training, trainer, fleet)
            parts = episode_parts(spec.recipe, spec.inputs, self.attempt.engines, engine=fleet)
            self.evaluator = training.evaluator(parts)
        source = Rows(spec.recipe, spec.inputs.rows)
        return training.new_run(source, trainer, devices, memory=lambda stepped: stepped.memory)

    async def evaluate(self, step: int) -> None:
        """Evaluate the loss on held-out rows, and the engines' answers to held-out prompts."""
        run, rows = self.training.run, self.spec.inputs.validation
        assert run is not None, "nothing runs yet"
        if rows:
            self.bus.emit(PhaseStarted(phase="eval", detail=f"{len(rows)} held-out rows"))
            began = time.monotonic()
            batch, _ = await in_thread(lambda: packed(run, list(rows)))
            report = await run.trainer.measure(batch)
            done = ValidationDone(
                step=step,
                loss=report.loss,
                num_rows=len(rows),
                seconds=time.monotonic() - began,
                figures=report.figures,
            )
            self.bus.emit(done)
            await self.training.track(done)
        if self.evaluator is not None and run.devices is not None:
            verify = self.spec.recipe.weights.verify
            detail = f"{len(self.evaluator.prompts)} held-out prompts"
            self.bus.emit(PhaseStarted(phase="eval", detail=detail))
            await run.devices.publish(version_of(step), verify=verify)
            self.bus.emit(evaluated := await self.evaluator.run(step))
            await self.training.track(evaluated)

    async def settle(self) -> None:
        """Do nothing: nothing runs beside the steps."""
