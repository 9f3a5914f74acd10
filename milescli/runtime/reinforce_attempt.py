"""One attempt at a run that learns from what engines sample: warm up, check that engine and trainer
agree, run the loop."""

from __future__ import annotations

from dataclasses import replace

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.core.concurrency import in_thread
from milescli.core.events import EngineTrainerChecked, Notice, PhaseStarted, WorkerMemory
from milescli.core.types import EVALUATION
from milescli.platform.memory_record import last_look
from milescli.rollout.collect.ahead import open_collector
from milescli.rollout.collect.selectors import as_state, from_state
from milescli.rollout.episode.episode import evaluation_episodes, training_episodes
from milescli.runtime import loop, truth
from milescli.runtime.attempt import Attempt
from milescli.runtime.devices import Devices
from milescli.runtime.evaluation.evaluator import ConcurrentEvaluations, Evaluator
from milescli.runtime.inputs.environment_nodes import SpreadEnvironments, spread_environments
from milescli.runtime.inputs.episode_parts import FirstFew, chat_form_of, scorer_of
from milescli.runtime.inputs.given_models import by_role, served_teachers
from milescli.runtime.recording.sample_files import SampleFiles
from milescli.runtime.recording.sample_journal import SampleJournal, open_journal
from milescli.runtime.recovery.engine_keepers import keep_frozen
from milescli.runtime.saving import Progress, version_of
from milescli.train.agreement import CORRECTED_KL, Agreement
from milescli.train.base import Trainer, adapts
from milescli.train.objectives import load_in_driver


class ReinforceAttempt(Attempt):
    """An attempt at a run that learns from what engines sample."""

    run: loop.Run | None
    beside: ConcurrentEvaluations | None = None
    """None: evaluations are answered by the engines of rollout."""
    environments: SpreadEnvironments | None = None
    """None: those of the run, if it has any, live beside the driver."""

    journal: SampleJournal | None = None
    """None: nothing is kept, or nothing runs yet."""
    kept: SampleFiles | None = None
    """None: nothing runs yet."""

    async def main(self) -> None:
        try:
            await super().main()
        finally:
            await self.close_journal()

    async def close_journal(self) -> None:
        """Close the journal; what was written stays."""
        if (journal := self.journal) is not None:
            await in_thread(journal.close)

    async def work(self, trainer: Trainer, fleet: SglangFleet | None) -> None:
        assert fleet is not None, "nothing is sampled without engines"
        self.journal = await open_journal(self.spec, self.saver.store, bus=self.bus)
        run = self.run = self._assemble(trainer, fleet)
        self.keep_own(fleet, run.devices)
        for name, served in self.engines.policies.items():
            keep_frozen(served, name, self.engines, self.session.builder, repairs=self.repairs)
        self.environments = await spread_environments(
            self.spec.recipe, self.session.resources, tell=self._warn
        )
        await self._join(run)
        await loop.reinforce(run)
        if self.beside is not None:
            await self.beside.finish()

    async def settle(self) -> None:
        if self.beside is not None:
            await self.beside.drop()
        if self.run is not None:
            await self.run.groups.stop()
        if self.environments is not None:
            self.environments.end()
        if self.kept is not None:
            await self.kept.finish()

    def _assemble(self, trainer: Trainer, fleet: SglangFleet) -> loop.Run:
        """Assemble the run in memory."""
        spec, recipe, inputs = self.spec, self.spec.recipe, self.spec.inputs
        parts = {
            "engine": fleet,
            "scorer": scorer_of(recipe, self.engines.scores),
            "decode": inputs.tokenizer.decode,
            "vocab_size": inputs.facts.vocab_size,
            "chat_form": chat_form_of(recipe, inputs.tokenizer),
            "policies": by_role(recipe, self.engines.policies),
            "tell": FirstFew(self._warn),
        }
        assert inputs.prompts is not None, "a run that samples has prompts"
        if spec.checkpoint is not None:
            inputs.prompts.seek(spec.checkpoint.manifest.prompt_position)
        self.evaluator = Evaluator(
            recipe=recipe,
            prompts=inputs.heldout,
            episodes=evaluation_episodes(
                recipe, **{**parts, "engine": self.engines.evaluation or fleet}
            ),
            folder=spec.run.eval_dir,
            side=self.side,
        )
        self.kept = SampleFiles(
            spec.run.rollouts_dir,
            inputs.tokenizer,
            side=self.side,
            num_groups=recipe.run.keep_groups,
        )
        objective = load_in_driver(recipe.train.objective, recipe)
        groups = open_collector(
            inputs.prompts,
            training_episodes(recipe, **parts, teachers=served_teachers(recipe)),
            recipe=recipe,
            with_greedy=getattr(objective, "needs_greedy", False),
            journal=self.journal,
            taken=spec.checkpoint.manifest.taken if spec.checkpoint is not None else (),
        )
        if spec.checkpoint is not None:
            groups.history.update(from_state(spec.checkpoint.manifest.curriculum))
            if adapts(objective):
                objective.restore(spec.checkpoint.manifest.objective)
        return loop.Run(
            recipe=recipe,
            plan=spec.plan,
            bus=self.bus,
            objective=objective,
            groups=groups,
            trainer=trainer,
            devices=self.devices(trainer, fleet),
            hooks=loop.Hooks(
                save=self.save,
                evaluate=self._evaluate,
                between=self.between_steps,
                memory=self.engine_memory,
                keep=self.kept.keep,
                tell=self.user.tell,
            ),
            stop=self.stop,
            step=self.step,
        )

    def keep_own(self, fleet: SglangFleet, devices: Devices) -> None:
        """From now on, replace an engine that samples for the run where it dies."""
        self.keep_engines(fleet, devices)

    def devices(self, trainer: Trainer, fleet: SglangFleet) -> Devices:
        """Return the turns of trainer and engines on the devices."""
        return Devices(
            taking_turns=self.taking_turns,
            trainer=trainer,
            engines=fleet,
            engines_asleep=self.taking_turns,
        )

    async def _join(self, run: loop.Run) -> None:
        """Give the engines the trainer's weights, and make sure that both compute the same, before
        the first step."""
        spec, recipe = self.spec, self.spec.recipe
        if (own := self.engines.evaluation) is not None:
            devices = Devices(
                taking_turns=False, trainer=run.trainer, engines=own, fleet=EVALUATION
            )
            self.beside = ConcurrentEvaluations(devices, self._measure, tell=self._warn)
            self.probes.append(self.beside.probe)
            self.keep_engines(own, devices).on_empty = self.beside.give_up
        if spec.checkpoint is None:
            await self.save(0)
        # the check below cannot see one wrong weight where all of them are rounded to 8 bits
        verify = recipe.weights.verify or spec.plan.device_kind == "cpu"
        await run.devices.publish(version_of(run.step), verify=verify)
        self.bus.emit(
            PhaseStarted(phase="check", detail="engine and trainer score the same samples")
        )
        assert spec.inputs.prompts is not None, "a run that samples has prompts"
        prompts = spec.inputs.heldout or spec.inputs.prompts.first(truth.NUM_PROMPTS)
        check = truth.TruthCheck(
            recipe=recipe,
            plan=spec.plan,
            num_layers=spec.inputs.facts.num_layers,
            has_experts=spec.inputs.facts.num_moe_layers > 0,
            devices=run.devices,
        )
        checked = await check.run(prompts[: truth.NUM_PROMPTS])
        if checked.agreement == Agreement.EXPLAINED:
            checked = self._corrected(checked, run.objective)
        self.bus.emit(checked)
        if run.step == 0:  # also of a run that died between its first checkpoint and here
            await self.stop.unless_set(self._evaluate(0))

    def _corrected(self, checked: EngineTrainerChecked, objective: object) -> EngineTrainerChecked:
        """Truncate ratios from now on, where the recipe's loss has no means of its own against
        engines that sample from another distribution. Says so, as does the verdict."""
        correct = getattr(objective, "truncate_mismatch", None)
        correction = (
            "too small a difference to need a correction"
            if checked.kl <= CORRECTED_KL
            else "each token is weighted by trainer / engine, at most 2 (TIS)"
            if correct is not None and correct()
            else "the recipe's own ratio or correction takes it into account"
            if correct is not None
            else "the objective has no correction for it: see train.correction"
        )
        self._warn(
            f"engine and trainer differ by {checked.times:.1f} times what rounding does: other "
            "kernels, experts that are chosen otherwise, or a small fault. "
            f"KL {checked.kl:.1e} nats a token (rounding: {checked.floor_kl:.1e}), "
            f"{checked.far:.1%} of ratios outside of [1/2, 2]; {correction}"
        )
        return replace(checked, correction=correction)

    async def save(self, step: int) -> None:
        await super().save(step)
        if self.journal is not None:
            self.journal.checkpoint()

    async def save_last(self) -> None:
        assert self.run is not None, "nothing runs yet"
        async with self.run.devices.scoring():  # a colocated trainer sleeps after each publish
            await super().save_last()

    def engine_memory(self) -> tuple[WorkerMemory, ...]:
        """On a CPU: of engines, as the watchdog saw them last."""
        if self.spec.plan.device_kind != "cpu":
            return ()
        held = last_look(self.session.log_dir)
        return tuple(
            WorkerMemory(worker=name.replace("-", " "), device="cpu", peak_bytes=size)
            for name, size in held.items()
            if name.startswith("engine")
        )

    def progress(self) -> Progress:
        run = self.run
        assert run is not None, "nothing runs yet"
        return Progress(
            prompt_position=run.groups.position,
            taken=run.groups.taken,
            objective=dict(run.objective.state) if adapts(run.objective) else {},
            curriculum=as_state(run.groups.history),
        )

    def _warn(self, text: str) -> None:
        self.bus.emit(Notice(text=text, level="warning"))

    async def _evaluate(self, step: int) -> None:
        if self.beside is None:
            await self._measure(step)
        elif self.spec.inputs.heldout:
            verify = self.spec.recipe.weights.verify
            await self.beside.begin(step, version_of(step), verify=verify)

    async def _measure(self, step: int) -> None:
        if heldout := self.spec.inputs.heldout:
            self.bus.emit(PhaseStarted(phase="eval", detail=f"{len(heldout)} held-out prompts"))
            self.bus.emit(done := await self.evaluator.run(step))
            await self.user.tell("tracker", event=done)
