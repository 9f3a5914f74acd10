"""One attempt at a run that learns from rows of a file: the trainer, and engines where an
evaluation asks for them."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.conversion.base import fingerprint
from milescli.core.concurrency import in_thread
from milescli.core.events import PhaseStarted, ValidationDone
from milescli.rollout.episode.episode import evaluation_episodes
from milescli.runtime.attempt import Attempt
from milescli.runtime.devices import Devices
from milescli.runtime.evaluation.evaluator import Evaluator
from milescli.runtime.inputs.episode_parts import chat_form_of, scorer_of
from milescli.runtime.inputs.given_models import served_teachers
from milescli.runtime.inputs.row_caches import ReferenceCache, TeacherCache
from milescli.runtime.row_loop import RowHooks, RowRun, batch_of, learn
from milescli.runtime.saving import Progress, version_of
from milescli.train.base import Trainer, adapts
from milescli.train.objectives import load_in_driver


class RowAttempt(Attempt):
    """An attempt at a run that learns from rows of files."""

    run: RowRun | None
    evaluator: Evaluator | None = None

    @property
    def asks_teachers(self) -> bool:
        """False where the cache knows all that the teachers would say, or they are served."""
        if self.spec.recipe.train.distill.is_served:
            return False
        return not self.spec.recipe.caches_teacher or bool(self._teacher.missing(self._rows))

    @property
    def _rows(self) -> list[Any]:
        """All rows that the run learns from or measures."""
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
            served=served and served.teachers[0].say_all,
        )

    async def prepare(self, trainer: Trainer) -> None:
        await super().prepare(trainer)
        if self.spec.recipe.caches_teacher:
            await self._know_teacher(trainer)
        if self.spec.recipe.caches_reference:
            await self._know_reference(trainer)

    async def recall(self, trainer: Trainer) -> None:
        if self.spec.recipe.caches_teacher:
            await self._know_teacher(trainer)
        if self.spec.recipe.caches_reference:
            start = await in_thread(lambda: self.saver.store.find(0))
            await trainer.load(start.path, weights_only=True)
            await self._know_reference(trainer)

    async def work(self, trainer: Trainer, fleet: SglangFleet | None) -> None:
        run = self.run = self._assemble(trainer, fleet)
        if fleet is not None and run.devices is not None:
            self.keep_engines(fleet, run.devices)
        if self.spec.checkpoint is None:
            await self.save(0)
        if run.step == 0:  # also of a run that died between its first checkpoint and here
            await self.stop.unless_set(self._measure(0))
        await learn(run)

    def _assemble(self, trainer: Trainer, fleet: SglangFleet | None) -> RowRun:
        """Return the run in memory."""
        spec, recipe, inputs = self.spec, self.spec.recipe, self.spec.inputs
        assert inputs.rows is not None, "a run that learns from rows has them"
        objective = load_in_driver(recipe.train.objective, recipe)
        if spec.checkpoint is not None:
            inputs.rows.position = spec.checkpoint.manifest.prompt_position
            if adapts(objective):
                objective.restore(spec.checkpoint.manifest.objective)
        devices = None
        if fleet is not None:
            devices = Devices(
                taking_turns=self.taking_turns,
                trainer=trainer,
                engines=fleet,
                engines_asleep=self.taking_turns,
            )
            self.evaluator = Evaluator(
                recipe=recipe,
                prompts=inputs.heldout,
                episodes=evaluation_episodes(
                    recipe,
                    engine=fleet,
                    scorer=scorer_of(recipe, self.engines.scores),
                    decode=inputs.tokenizer.decode,
                    vocab_size=inputs.facts.vocab_size,
                    chat_form=chat_form_of(recipe, inputs.tokenizer),
                ),
                folder=spec.run.eval_dir,
                side=self.side,
            )
        return RowRun(
            recipe=recipe,
            plan=spec.plan,
            bus=self.bus,
            objective=objective,
            rows=inputs.rows,
            trainer=trainer,
            devices=devices,
            hooks=RowHooks(
                save=self.save,
                between=self.between_steps,
                measure=self._measure,
                tell=self.user.tell,
            ),
            stop=self.stop,
            step=self.step,
        )

    async def _measure(self, step: int) -> None:
        """The loss on held-out rows, and what engines answer to held-out prompts."""
        run, rows = self.run, self.spec.inputs.validation
        assert run is not None, "nothing runs yet"
        if rows:
            self.bus.emit(PhaseStarted(phase="eval", detail=f"{len(rows)} held-out rows"))
            began = time.monotonic()
            batch = await in_thread(lambda: batch_of(run, list(rows)))
            report = await run.trainer.measure(batch)
            done = ValidationDone(
                step=step,
                loss=report.loss,
                num_rows=len(rows),
                seconds=time.monotonic() - began,
                figures=report.figures,
            )
            self.bus.emit(done)
            await self.user.tell("tracker", event=done)
        if self.evaluator is not None and run.devices is not None:
            detail = f"{len(self.evaluator.prompts)} held-out prompts"
            self.bus.emit(PhaseStarted(phase="eval", detail=detail))
            await run.devices.publish(version_of(step), verify=run.recipe.weights.verify)
            self.bus.emit(evaluated := await self.evaluator.run(step))
            await self.user.tell("tracker", event=evaluated)

    async def _know(
        self, cache: ReferenceCache | TeacherCache, trainer: Trainer, *, phase: str, told: str
    ) -> None:
        """Fill the rows from the cache; those that it lacks are put before the trainer's ranks
        now."""
        inputs = self.spec.inputs
        assert inputs.rows is not None, "a run that learns from rows has them"
        if missing := cache.missing(self._rows):
            self.bus.emit(PhaseStarted(phase=phase, detail=f"{len(missing)} {told}"))
            await cache.add(missing, trainer=trainer, plan=self.spec.plan, stop=self.stop)
        inputs.rows.items = [cache.known(row) for row in inputs.rows.items]
        inputs.validation[:] = [cache.known(row) for row in inputs.validation]

    async def _know_reference(self, trainer: Trainer) -> None:
        """Log-probs of the rows by the weights at the start, which the trainer has now."""
        cache = ReferenceCache(self.spec.run.path / "reference")
        told = "pairs are scored by the weights at the start"
        await self._know(cache, trainer, phase="reference", told=told)

    async def _know_teacher(self, trainer: Trainer) -> None:
        """Fill the rows from the teacher, then dismiss it."""
        told = "rows are put before the teacher"
        await self._know(self._teacher, trainer, phase="teacher", told=told)
        await trainer.dismiss_teachers()

    def progress(self) -> Progress:
        run = self.run
        assert run is not None, "nothing runs yet"
        return Progress(
            prompt_position=run.rows.position,
            objective=dict(run.objective.state) if adapts(run.objective) else {},
        )

    async def save_last(self) -> None:
        if self.run is not None and self.run.devices is not None:
            async with self.run.devices.training():
                await super().save_last()
        else:
            await super().save_last()
