"""One attempt at a run: start everything, warm up, check that engine and trainer agree, run the
loop, save, end clean. Called by `train`."""

from __future__ import annotations

import asyncio
import json

from milescli.checkpoint.store import CheckpointStore
from milescli.core.concurrency import in_thread
from milescli.core.errors import Stopped
from milescli.core.events import EventBus, PhaseStarted
from milescli.core.isolated import close_lanes
from milescli.core.types import Group
from milescli.rollout.ahead import open_collector
from milescli.rollout.base import RolloutEngine
from milescli.rollout.curriculum import as_state, from_state
from milescli.rollout.episode import evaluation_episodes, training_episodes
from milescli.runtime import loop, truth
from milescli.runtime.build import Engines, engine_probe, rank_probe
from milescli.runtime.devices import Devices
from milescli.runtime.evaluator import Evaluator
from milescli.runtime.inputs import scorer_of
from milescli.runtime.saving import Progress, Saver, version_of
from milescli.runtime.session import RunSession
from milescli.runtime.spec import RunSpec
from milescli.runtime.supervise import Probe, StopSignals, run_watched
from milescli.runtime.user_hooks import UserHooks
from milescli.train.base import Trainer, adapts
from milescli.train.objectives import load_in_driver

KEPT_GROUPS = 4
"""Groups of each step that are written to rollouts/, to read."""


class Attempt:
    """Holds what is running, from the first actor to the last."""

    def __init__(self, spec: RunSpec, *, session: RunSession, bus: EventBus) -> None:
        self.spec, self.session, self.bus = spec, session, bus
        self.engines = Engines()
        self.probes: list[Probe] = []
        self.run: loop.Run | None = None
        recipe = spec.recipe
        store = CheckpointStore(
            spec.run.checkpoints,
            keep=recipe.checkpoint.keep,
            protect={0, recipe.reference_step(spec.first_step)}
            if recipe.keeps_reference
            else set(),
        )
        self.user = UserHooks(recipe)
        self.saver = Saver(store=store, spec=spec, bus=bus, tell=self.user.tell)
        self.saver.newest_step = spec.checkpoint.step if spec.checkpoint else None
        self.stop = loop.StopFlag()

    @property
    def step(self) -> int:
        """RL steps done."""
        return self.run.step if self.run else self.spec.first_step

    @property
    def _taking_turns(self) -> bool:
        """Engines and trainer share device memory, so that the trainer can only start beside
        sleeping engines."""
        plan = self.spec.plan
        return plan.colocated and plan.device_kind != "cpu"

    async def main(self) -> None:
        """The whole attempt, watched."""
        try:
            command = f"miles resume {self.spec.run.shown}"
            signals = StopSignals(on_stop=self._on_stop, again=command)
            await run_watched(
                self._work(), self.probes, signals, cause_grace_s=self.session.cause_grace_s
            )
        finally:
            await self.engines.stop()
            await asyncio.to_thread(close_lanes)
            await self.session.resources.release()

    def _on_stop(self) -> bool:
        if self.run is None:
            return False
        self.bus.emit(
            PhaseStarted(
                phase="stop",
                detail="finishing what is half done, then saving; once more ends at once",
            )
        )
        self.stop.set()
        return True

    async def _work(self) -> None:
        """Trainer and engines start side by side, and the warm-up does not wait for the engines,
        where the devices allow it."""
        plan = self.spec.plan
        detail = f"{plan.trainer.world_size} trainer ranks, {plan.engines.num} engines"
        self.bus.emit(PhaseStarted(phase="start", detail=detail))
        await self.session.resources.take(timeout_s=self.spec.recipe.machine.start_timeout_s)
        self.probes.append(self.session.cluster.check_nodes)
        engines = asyncio.ensure_future(self.session.builder.start_engines(self.engines))
        self.probes.append(_failure_of(engines))
        try:
            if self._taking_turns:
                await (await engines).sleep()
            trainer = await self._start_trainer()
            run = self.run = self._assemble(trainer, await engines)
            await self._join(run)
            await loop.reinforce(run)
        except Stopped:
            if self.run is not None:
                await self.run.groups.stop()
            await self._save_and_stop()
        finally:
            engines.cancel()
            await asyncio.gather(engines, return_exceptions=True)
            if self.run is not None:
                await self.run.groups.stop()
        await self.saver.settle()

    async def _start_trainer(self) -> Trainer:
        """The ranks, with the weights to begin from: of the checkpoint, or of the model after its
        warm-up."""
        recipe, checkpoint = self.spec.recipe, self.spec.checkpoint
        ranks = await self.session.builder.start_trainer()
        self.probes.extend(rank_probe(handle) for handle in ranks.ranks)
        trainer: Trainer = ranks
        if checkpoint is None:
            if recipe.warmup.steps:
                await loop.warm_up(
                    recipe=recipe,
                    plan=self.spec.plan,
                    trainer=trainer,
                    demonstrations=self.spec.inputs.demonstrations,
                    bus=self.bus,
                    stop=self.stop,
                    tell=self.user.tell,
                )
        elif recipe.keeps_reference:
            reference = self.saver.store.find(recipe.reference_step(checkpoint.step))
            await trainer.load(reference.path, weights_only=True)
        if recipe.keeps_reference:
            await trainer.freeze_reference()
        if checkpoint is not None:
            await trainer.load(checkpoint.path)
        return trainer

    def _assemble(self, trainer: Trainer, fleet: RolloutEngine) -> loop.Run:
        """The run in memory."""
        self.probes.extend(
            engine_probe(h, s)
            for h, s in zip(self.engines.handles, self.engines.specs, strict=True)
        )
        spec, recipe, inputs = self.spec, self.spec.recipe, self.spec.inputs
        parts = {
            "engine": fleet,
            "scorer": scorer_of(recipe),
            "decode": inputs.tokenizer.decode,
            "vocab_size": inputs.facts.vocab_size,
        }
        if spec.checkpoint is not None:
            inputs.prompts.seek(spec.checkpoint.manifest.prompt_position)
        self.evaluator = Evaluator(
            recipe=recipe,
            prompts=inputs.heldout,
            episodes=evaluation_episodes(recipe, **parts),
            folder=spec.run.eval_dir,
        )
        objective = load_in_driver(recipe.train.objective, recipe)
        groups = open_collector(
            inputs.prompts,
            training_episodes(recipe, **parts),
            recipe=recipe,
            with_greedy=getattr(objective, "needs_greedy", False),
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
            devices=Devices(
                taking_turns=self._taking_turns,
                trainer=trainer,
                engines=fleet,
                engines_asleep=self._taking_turns,
            ),
            hooks=loop.Hooks(
                save=self._save,
                settle=self.saver.settle,
                evaluate=self._evaluate,
                keep=self._keep,
                tell=self.user.tell,
            ),
            stop=self.stop,
            step=self.step,
        )

    async def _join(self, run: loop.Run) -> None:
        """Give the engines the trainer's weights, and make sure that both compute the same, before
        the first step."""
        spec, recipe = self.spec, self.spec.recipe
        await run.trainer.connect_engines(self.session.builder.engine_addresses(self.engines))
        if spec.checkpoint is None:
            await self.saver.save(run.trainer, step=0, progress=_progress_of(run))
        await run.devices.publish(version_of(run.step), verify=recipe.weights.verify)
        self.bus.emit(
            PhaseStarted(phase="check", detail="engine and trainer score the same samples")
        )
        prompts = spec.inputs.heldout or spec.inputs.prompts.first(truth.NUM_PROMPTS)
        check = truth.TruthCheck(
            recipe=recipe,
            plan=spec.plan,
            num_layers=spec.inputs.facts.num_layers,
            devices=run.devices,
        )
        self.bus.emit(await check.run(prompts[: truth.NUM_PROMPTS]))
        if spec.checkpoint is None:
            await self.stop.unless_set(self._evaluate(0))

    async def _save(self, step: int) -> None:
        assert self.run is not None, "nothing runs yet"
        run = self.run
        progress = await in_thread(lambda: _progress_of(run))
        await self.saver.save(run.trainer, step=step, progress=progress)
        if self.spec.recipe.keeps_reference:
            # what a resumed run takes its reference from is not forgotten
            self.saver.store.protect = {0, self.spec.recipe.reference_step(step)}

    async def _save_and_stop(self) -> None:
        """Save what was learned since the newest checkpoint, then say how to go on."""
        command = f"miles resume {self.spec.run.shown}"
        if self.run is None:
            raise Stopped(
                "stopped before the first step",
                why="Ctrl-C or SIGTERM; nothing was trained yet",
                fix=command,
            )
        await self.saver.settle()
        if self.run.step > (self.saver.newest_step or 0):
            async with self.run.devices.training():  # a colocated trainer sleeps after each publish
                await self._save(self.run.step)
                await self.saver.settle()
        raise Stopped(
            f"stopped after step {self.run.step}, and saved", why="Ctrl-C or SIGTERM", fix=command
        )

    async def _evaluate(self, step: int) -> None:
        if heldout := self.spec.inputs.heldout:
            self.bus.emit(PhaseStarted(phase="eval", detail=f"{len(heldout)} held-out prompts"))
            self.bus.emit(done := await self.evaluator.run(step))
            await self.user.tell("tracker", event=done)

    def _keep(self, step: int, groups: list[Group]) -> None:
        folder = self.spec.run.rollouts_dir
        folder.mkdir(exist_ok=True)
        lines = [
            json.dumps(
                {
                    "prompt": group.prompt.text,
                    "response": sample.text,
                    "reward": sample.reward,
                    "stop_reason": sample.stop_reason.value,
                    "versions": [span.version for span in sample.version_spans],
                    "seed": sample.seed,
                    "prompt_index": group.prompt.index,
                    "response_ids": sample.response_ids,
                }
            )
            for group in groups[:KEPT_GROUPS]
            for sample in group.samples
        ]
        (folder / f"step_{step}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _failure_of(starting: asyncio.Future[RolloutEngine]) -> Probe:
    """Engines that fail to start end the run at once, and not after the warm-up."""

    async def probe() -> None:
        if starting.done() and not starting.cancelled() and (error := starting.exception()):
            raise error

    return probe


def _progress_of(run: loop.Run) -> Progress:
    """What a checkpoint keeps of it beside the weights."""
    return Progress(
        prompt_position=run.groups.position,
        objective=dict(run.objective.state) if adapts(run.objective) else {},
        curriculum=as_state(run.groups.history),
    )
