"""Trains on groups that engines sample: sets up the journal and the parts of the loop, checks that
engine and trainer agree, then runs the loop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.core.events import EngineTrainerChecked, Notice, PhaseStarted, StepDone, WorkerMemory
from milescli.core.imports import run_gc_rarely
from milescli.core.types import EVALUATION, ROLLOUT, Group, StepReport
from milescli.plan.collectors import why_in_driver
from milescli.platform.memory_record import last_sample
from milescli.rollout.collect.prefetching import open_collector
from milescli.rollout.collect.selectors import history_from_state
from milescli.rollout.episode.episode import training_episodes
from milescli.runtime import engine_trainer_check
from milescli.runtime.collecting.collectors import Collectors
from milescli.runtime.devices import Devices
from milescli.runtime.evaluation.evaluator import ConcurrentEvaluations, Evaluator
from milescli.runtime.inputs.auxiliary_models import served_teachers
from milescli.runtime.inputs.environment_nodes import SpreadEnvironments, spread_environments
from milescli.runtime.inputs.episode_parts import episode_parts
from milescli.runtime.loop import Run, learn, pack_here, packing_of
from milescli.runtime.recording.sample_files import Place, SampleFiles
from milescli.runtime.recording.sample_journal import open_journal
from milescli.runtime.recovery.engine_keepers import keep_frozen
from milescli.runtime.saving import version_of
from milescli.runtime.sources import AnyCollector, Groups
from milescli.train.agreement import CORRECTED_KL, LARGE_KL, LARGE_SHARE, Agreement
from milescli.train.base import StepResult, TrainBatch, Trainer
from milescli.train.objectives.policy import Policy

if TYPE_CHECKING:
    from milescli.runtime.training import Training


class GroupWork:
    """Trains on groups that engines sample."""

    asks_teachers = True
    """True: the trainer's ranks hold the run's teachers, if it has any."""

    def __init__(self, training: Training) -> None:
        self.training, self.attempt = training, training.attempt
        self.spec, self.bus, self.user = training.spec, training.bus, training.user
        self.evaluator: Evaluator | None = None
        self.beside: ConcurrentEvaluations | None = None
        """None: the engines of rollout answer evaluations."""
        self.environments: SpreadEnvironments | None = None
        """None: the run's environments, if it has any, are on the driver's node."""
        self.files: SampleFiles | None = None
        self.collector: AnyCollector | None = None
        """Both are None if nothing runs yet."""
        self.collectors: Collectors | None = None
        """None: this process collects, or nothing runs yet."""

    async def prepare(self, trainer: Trainer) -> None:
        """Do nothing: engines sample later."""

    async def learn(self, trainer: Trainer, fleet: SglangFleet | None) -> None:
        """Take the steps to the last one."""
        assert fleet is not None, "nothing is sampled without engines"
        training, attempt = self.training, self.attempt
        training.journal = await open_journal(self.spec, training.saver.store, bus=self.bus)
        devices = attempt.devices_of(training, trainer, fleet)
        self.collectors = self._collectors(fleet)
        run = training.run = self._run(trainer, fleet, devices)
        if training.adapter is None:  # else one keeper keeps the engines alive for all adapters
            attempt.keep_engines(fleet, ROLLOUT, join=devices.replace)
        engines, builder = attempt.engines, attempt.session.builder
        for name, served in engines.policies.items():
            keep_frozen(served, name, engines, builder, repairs=attempt.repairs)
        self.environments = await spread_environments(
            self.spec.recipe,
            attempt.session.cluster,
            sorted(attempt.session.resources.agents),
            tell=self._warn,
        )
        await self._join(run, devices)
        if self.collectors is not None:
            await self.collectors.open()
        run_gc_rarely()
        await learn(run)
        if self.beside is not None:
            await self.beside.finish()

    async def settle(self) -> None:
        """Stop the evaluations and collecting processes that run beside the steps. May be called
        more than once."""
        if self.beside is not None:
            await self.beside.drop()
        if (run := self.training.run) is not None:
            await run.source.stop()
        if self.collectors is not None:
            await self.collectors.close()
        if self.environments is not None:
            self.environments.end()
        if self.files is not None:
            await self.files.finish()

    def _collectors(self, fleet: SglangFleet) -> Collectors | None:
        """Return the processes that collect; None if the plan has none."""
        training, session, engines = self.training, self.attempt.session, self.attempt.engines
        recipe, adapter = self.spec.recipe, training.adapter
        if not (count := self.spec.plan.collectors):
            return None
        if (why := why_in_driver(recipe)) is not None:  # of one of several adapters
            self._warn(f"the driver collects the samples of the adapter `{adapter}`: {why}")
            return None
        collectors = Collectors(
            partial(
                session.builder.start_collector,
                recipe=recipe,
                adapter=adapter,
                fleet=fleet,
                journal=training.journal,
                policies=engines.policies,
                with_greedy=getattr(training.objective, "needs_greedy", False),
            ),
            session.cluster.kill,
            count=count // max(1, len(self.attempt.spec.adapters)),
            recipe=recipe,
            fleet=fleet,
            journal=training.journal,
            repairs=self.attempt.repairs,
            warn=self._warn,
            adapter=adapter,
            policies=engines.policies,
            scorer=lambda: None if engines.scorer is None else engines.scorer.ranks[0],
        )
        engines.on_scorer.append(collectors.use_scorer)
        return collectors

    async def _pack(self, run: Run, items: list[Group]) -> tuple[TrainBatch, dict[Place, int]]:
        """Pack groups whose tokens other processes hold, and fetch the tokens of those that are
        written to disk."""
        collectors, objective = self.collectors, cast("Policy", run.objective)
        assert collectors is not None and self.collector is not None, "nothing is elsewhere"
        number = self.spec.recipe.run.keep_groups
        items[:number] = whole = await collectors.whole(items[:number])
        sequences = [
            sequence
            for index, group in enumerate(whole)
            for sequence in objective.of_group(group, [0.0] * len(group.samples), number=index)
        ]
        shown = run.source.shown(whole, sequences)
        settings = packing_of(run, logprob_ids=set(shown.values()))
        batch = await collectors.batch(items, objective, **settings)
        collectors.release(items, before=self.collector.position)
        return batch, shown

    def _run(self, trainer: Trainer, fleet: SglangFleet, devices: Devices) -> Run:
        """Return the Run for the loop."""
        spec, training, engines = self.spec, self.training, self.attempt.engines
        recipe, inputs, checkpoint = spec.recipe, spec.inputs, spec.checkpoint
        assert inputs.prompts is not None, "a run that samples has prompts"
        if checkpoint is not None:
            inputs.prompts.seek(checkpoint.manifest.prompt_position)
        parts = episode_parts(recipe, inputs, engines, engine=fleet, warn=self._warn)
        self.evaluator = training.evaluator({**parts, "engine": engines.evaluation or fleet})
        self.files = SampleFiles(
            spec.run,
            inputs.tokenizer,
            side=training.side,
            num_groups=recipe.run.keep_groups,
        )
        collector = self.collector = open_collector(
            inputs.prompts,
            training_episodes(recipe, **parts, teachers=served_teachers(recipe, inputs.tokenizer)),
            recipe=recipe,
            with_greedy=getattr(training.objective, "needs_greedy", False),
            compared=getattr(training.objective, "compares", ()),
            journal=training.journal,
            taken=checkpoint.manifest.taken if checkpoint is not None else (),
            group_sampler=self.collectors,
        )
        if checkpoint is not None:
            collector.history.update(history_from_state(checkpoint.manifest.curriculum))
        return training.new_run(
            Groups(recipe, collector),
            trainer,
            devices,
            taken=self._on_taken,
            pack=pack_here if self.collectors is None else self._pack,
            trained=self._on_trained,
            keep=self.files.keep,
            memory=self._memory,
            done=self._on_done,
        )

    async def _on_taken(self, step: int, groups: list[Group]) -> None:
        """Call the user's hooks with the groups that were taken, and those that the filter
        refused."""
        assert self.collector is not None, "nothing runs yet"
        refused = self.collector.refused
        await self.user.call("all_samples", step=step, groups=groups, refused=refused)
        await self.user.call("before_step", step=step, groups=groups)

    async def _on_trained(self, step: int, report: StepReport) -> None:
        """Raise MismatchError if the plan says that steps are exact and this one was not."""
        engine_trainer_check.require_exact(
            self.spec.plan,
            report,
            step=step,
            run=self.spec.run.typed,
            journal=self.training.journal,
        )

    async def _on_done(self, event: StepDone, groups: list[Group]) -> None:
        await self.user.call("after_step", step=event.step, report=event.report, groups=groups)
        await self.training.track(event)

    async def _join(self, run: Run, devices: Devices) -> None:
        """Send the trainer's weights to the engines, and check that both compute the same, before
        the first step."""
        spec, recipe, attempt = self.spec, self.spec.recipe, self.attempt
        if (own := attempt.engines.evaluation) is not None:
            evaluation_devices = Devices(
                shares_memory=False, trainer=run.trainer, engines=own, fleet=EVALUATION
            )
            self.beside = ConcurrentEvaluations(evaluation_devices, self._measure, tell=self._warn)
            attempt.probes.append(self.beside.probe)
            keeper = attempt.keep_engines(own, EVALUATION, join=evaluation_devices.replace)
            keeper.on_empty = self.beside.give_up
        if spec.checkpoint is None:
            await self.training.save(0)
        # the check below cannot see one wrong weight where all of them are rounded to 8 bits
        verify = recipe.weights.verify or spec.plan.device_kind == "cpu"
        await devices.publish(version_of(run.step), verify=verify)
        self.bus.emit(
            PhaseStarted(phase="check", detail="engine and trainer score the same samples")
        )
        assert spec.inputs.prompts is not None, "a run that samples has prompts"
        prompts = spec.inputs.heldout or spec.inputs.prompts.first(engine_trainer_check.NUM_PROMPTS)
        check = engine_trainer_check.EngineTrainerCheck(
            recipe=recipe,
            plan=spec.plan,
            num_layers=spec.inputs.facts.num_layers,
            has_experts=spec.inputs.facts.num_moe_layers > 0,
            devices=devices,
            run_typed=self.spec.run.typed,
        )
        checked = await check.run(prompts[: engine_trainer_check.NUM_PROMPTS])
        if checked.agreement == Agreement.EXPLAINED:
            checked = self._with_correction(checked, run.objective)
        self.bus.emit(checked)
        if run.step == 0:  # also of a run that died between its first checkpoint and here
            await attempt.stop.unless_set(self.evaluate(0))

    def _with_correction(
        self, checked: EngineTrainerChecked, objective: object
    ) -> EngineTrainerChecked:
        """Return the event with the correction of the difference, and warn the user. If the
        objective can, truncate its importance ratios from now on."""
        correct = getattr(objective, "truncate_mismatch", None)
        correction = (
            "the difference is too small to need a correction"
            if checked.kl <= CORRECTED_KL
            else "each token is weighted by trainer / engine, at most 2 (TIS)"
            if correct is not None and correct()
            else "the recipe's own ratio or correction accounts for it"
            if correct is not None
            else "the objective does not correct it: see train.correction"
        )
        plan = self.spec.plan
        cause = "other kernels, a different choice of experts, or a small fault"
        if plan.formats_differ:
            cause = (
                f"the trainer multiplies by {plan.trainer_format or 'plain'} weights"
                + " and rounded inputs" * plan.quantises_inputs
                + f", engines by {plan.engine_format or 'plain'} weights"
            )
        if checked.kl > LARGE_KL or checked.far > LARGE_SHARE:
            cause += "; this is more than corrections are known to compensate"
        self._warn(
            f"engine and trainer differ by {checked.times:.1f} times the effect of rounding: "
            f"{cause}. KL {checked.kl:.1e} nats per token (rounding: {checked.floor_kl:.1e}), "
            f"{checked.far:.1%} of ratios outside of [1/2, 2]; {correction}"
        )
        return replace(checked, correction=correction)

    def _memory(self, stepped: StepResult) -> tuple[WorkerMemory, ...]:
        """Return the memory of the ranks; on a CPU also that of engines, as the watchdog last
        measured it."""
        if self.spec.plan.device_kind != "cpu":
            return stepped.memory
        sizes = last_sample(self.attempt.session.log_dir)
        return stepped.memory + tuple(
            WorkerMemory(worker=name.replace("-", " "), device="cpu", peak_bytes=size)
            for name, size in sizes.items()
            if name.startswith("engine")
        )

    def _warn(self, text: str) -> None:
        self.bus.emit(Notice(text=text, level="warning"))

    async def evaluate(self, step: int) -> None:
        """Evaluate the weights of `step` on held-out prompts, if there are any; with separate
        engines the evaluation continues beside the next steps."""
        if self.beside is None:
            await self._measure(step)
        elif self.spec.inputs.heldout:
            verify = self.spec.recipe.weights.verify
            await self.beside.begin(step, version_of(step), verify=verify)

    async def _measure(self, step: int) -> None:
        if heldout := self.spec.inputs.heldout:
            assert self.evaluator is not None, "nothing runs yet"
            self.bus.emit(PhaseStarted(phase="eval", detail=f"{len(heldout)} held-out prompts"))
            self.bus.emit(done := await self.evaluator.run(step))
            await self.training.track(done)
