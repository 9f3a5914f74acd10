"""One attempt at a run: start everything, warm up, check the truth, run the loop, save, end clean.
Called by launch and resume."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from milescli.checkpoint.run_dir import RunDir
from milescli.checkpoint.store import CheckpointStore, StoredCheckpoint
from milescli.cluster.nodes import RunNodes
from milescli.console.live import LiveRun
from milescli.core.errors import MilesError, Stopped, WaitTimeout, WorkerDied
from milescli.core.events import EvalDone, Event, EventBus, PhaseStarted, RunEnded, StepDone
from milescli.core.types import Group
from milescli.plan.types import Plan
from milescli.recipe.schema import Recipe
from milescli.rollout.ahead import open_collector
from milescli.rollout.base import RolloutEngine
from milescli.runtime import loop, observe, truth
from milescli.runtime.build import Engines, engine_probe, rank_probe
from milescli.runtime.devices import Devices
from milescli.runtime.evaluate import Evaluator
from milescli.runtime.launch import RunSummary
from milescli.runtime.material import Material, scorer_of
from milescli.runtime.saving import Saver, version_of
from milescli.runtime.session import Session, open_session
from milescli.runtime.supervise import Probe, StopSignals, run_watched
from milescli.runtime.trainer import RankGroup

if TYPE_CHECKING:
    from milescli.console.output import Output

KEPT_GROUPS = 4
"""Groups of each step that are written to rollouts/, to read."""


def train(
    *,
    run: RunDir,
    recipe: Recipe,
    plan: Plan,
    sites: RunNodes,
    material: Material,
    checkpoint: StoredCheckpoint | None,
    bus: EventBus,
    output: Output,
) -> RunSummary:
    """Train to the recipe's last step. Raises what ended it early, after everything was stopped and
    the verdict written."""
    began = time.monotonic()
    log_dir = run.new_attempt()
    record = _Record()
    bus.listeners.append(record)
    observe.attach(bus, run, recipe.run)
    with LiveRun(output, name=run.name) as live:
        bus.listeners.append(live)
        with open_session(
            run=run,
            log_dir=log_dir,
            recipe=recipe,
            plan=plan,
            sites=sites,
            model_dir=material.model_dir,
            facts=material.facts,
        ) as session:
            attempt = Attempt(
                session=session,
                recipe=recipe,
                plan=plan,
                material=material,
                checkpoint=checkpoint,
                bus=bus,
            )
            try:
                asyncio.run(attempt.main())
            except BaseException as error:
                _offer_resume(error, run, attempt.saver.newest_step)
                _conclude(attempt, bus, time.monotonic() - began, error)
                raise
            _conclude(attempt, bus, time.monotonic() - began, None)
        live.save_svg(run.picture_file, command=f"miles launch --recipe {recipe.name}")
    return RunSummary(
        path=run.shown,
        steps=attempt.step,
        accuracy_before=record.accuracies.get(min(record.accuracies))
        if record.accuracies
        else None,
        accuracy_after=record.accuracies.get(attempt.step),
        logprob_diff_max=record.diff_max,
        logprob_diff_mean=record.diff_mean,
        checkpoint=attempt.saver.newest.name if attempt.saver.newest else "",
        seconds=time.monotonic() - began,
    )


def _offer_resume(error: BaseException, run: RunDir, step: int | None) -> None:
    """What was lost with a process is no more than what came after the newest checkpoint."""
    if isinstance(error, WorkerDied | WaitTimeout) and step is not None:
        error.fixes.append(f"miles resume {run.shown}   # goes on from step {step}")


def _conclude(attempt: Attempt, bus: EventBus, seconds: float, error: BaseException | None) -> None:
    outcome = "done" if error is None else "stopped" if isinstance(error, Stopped) else "failed"
    told = (
        error.as_dict()
        if isinstance(error, MilesError)
        else {"error": repr(error)}
        if error
        else None
    )
    bus.emit(RunEnded(outcome=outcome, step=attempt.step, seconds=seconds, error=told))
    verdict = {"outcome": outcome, "step": attempt.step, "error": told}
    attempt.session.verdict_file.write_text(json.dumps(verdict) + "\n", encoding="utf-8")


@dataclass(slots=True)
class _Record:
    """Listens for what the summary tells."""

    accuracies: dict[int, float] = field(default_factory=dict)
    diff_max: float = 0.0
    _diff_sum: float = 0.0
    _num_steps: int = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, EvalDone):
            self.accuracies[event.step] = event.accuracy
        elif isinstance(event, StepDone):
            self.diff_max = max(self.diff_max, event.report.logprob_diff_max)
            self._diff_sum += event.report.logprob_diff_mean
            self._num_steps += 1

    @property
    def diff_mean(self) -> float:
        """Over the steps."""
        return self._diff_sum / max(self._num_steps, 1)


def _failure_of(starting: asyncio.Future[RolloutEngine]) -> Probe:
    """Engines that fail to start end the run at once, and not after the warm-up."""

    async def probe() -> None:
        if starting.done() and not starting.cancelled() and (error := starting.exception()):
            raise error

    return probe


class Attempt:
    """Holds what is running, from the first actor to the last."""

    def __init__(
        self,
        *,
        session: Session,
        recipe: Recipe,
        plan: Plan,
        material: Material,
        checkpoint: StoredCheckpoint | None,
        bus: EventBus,
    ) -> None:
        self.session, self.recipe, self.plan, self.material, self.bus = (
            session,
            recipe,
            plan,
            material,
            bus,
        )
        self.checkpoint = checkpoint
        self.engines = Engines()
        self.probes: list[Probe] = []
        self.run: loop.Run | None = None
        store = CheckpointStore(
            session.run.checkpoints,
            keep=recipe.checkpoint.keep,
            protect={0} if recipe.train.kl_coef else set(),
        )
        self.saver = Saver(
            store=store, run=session.run, recipe=recipe, plan=plan, material=material, bus=bus
        )
        self.saver.newest_step = checkpoint.manifest.step if checkpoint else None
        self.stop = loop.StopFlag()

    @property
    def step(self) -> int:
        """RL steps done."""
        return (
            self.run.step if self.run else self.checkpoint.manifest.step if self.checkpoint else 0
        )

    @property
    def _engines_sleep_first(self) -> bool:
        """Engines and trainer share device memory, so that the trainer can only start beside
        sleeping engines."""
        return self.plan.colocated and self.plan.device_kind != "cpu"

    async def main(self) -> None:
        """The whole attempt, watched."""
        try:
            signals = StopSignals(
                on_stop=self._on_stop, again=f"miles resume {self.session.run.shown}"
            )
            await run_watched(
                self._work(), self.probes, signals, cause_grace_s=self.session.cause_grace_s
            )
        finally:
            await self.engines.stop()
            await self.session.ground.release()

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
        self.bus.emit(
            PhaseStarted(
                phase="start",
                detail=f"{self.plan.trainer.world_size} trainer ranks, {self.plan.engines.num} "
                "engines",
            )
        )
        await self.session.ground.take(timeout_s=self.recipe.machine.start_timeout_s)
        self.probes.append(self.session.cluster.check_nodes)
        engines = asyncio.ensure_future(self.session.builder.start_engines(self.engines))
        self.probes.append(_failure_of(engines))
        try:
            if self._engines_sleep_first:
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

    async def _start_trainer(self) -> RankGroup:
        """The ranks, with the weights to begin from: of the checkpoint, or of the model after its
        warm-up."""
        trainer = await self.session.builder.start_trainer()
        self.probes.extend(rank_probe(handle) for handle in trainer.ranks)
        base = self.saver.store.path(0)
        if self.checkpoint is None:
            if self.recipe.warmup.steps:
                await loop.warm_up(
                    recipe=self.recipe,
                    plan=self.plan,
                    trainer=trainer,
                    demonstrations=self.material.demonstrations,
                    bus=self.bus,
                    stop=self.stop,
                )
        elif self.recipe.train.kl_coef:
            await trainer.load(base, weights_only=True)
        if self.recipe.train.kl_coef:
            await trainer.freeze_reference()
        if self.checkpoint is not None:
            await trainer.load(self.checkpoint.path)
        return trainer

    def _assemble(self, trainer: RankGroup, fleet: RolloutEngine) -> loop.Run:
        """The run in memory."""
        self.probes.extend(
            engine_probe(h, s)
            for h, s in zip(self.engines.handles, self.engines.specs, strict=True)
        )
        recipe, material = self.recipe, self.material
        scorer = scorer_of(recipe.rollout)
        devices = Devices(
            colocated=self.plan.colocated,
            trainer=trainer,
            engines=fleet,
            engines_asleep=self._engines_sleep_first,
        )
        if self.checkpoint is not None:
            material.prompts.seek(self.checkpoint.manifest.prompt_position)
        self.collector = open_collector(
            material.prompts, fleet, scorer, recipe=recipe, decode=material.tokenizer.decode
        )
        self.evaluator = Evaluator(
            recipe=recipe,
            prompts=material.heldout,
            engine=fleet,
            scorer=scorer,
            tokenizer=material.tokenizer,
            folder=self.session.run.eval_dir,
        )
        hooks = loop.Hooks(
            save=self._save, settle=self.saver.settle, evaluate=self._evaluate, keep=self._keep
        )
        return loop.Run(
            recipe=recipe,
            plan=self.plan,
            bus=self.bus,
            groups=self.collector,
            trainer=trainer,
            devices=devices,
            hooks=hooks,
            stop=self.stop,
            step=self.step,
        )

    async def _join(self, run: loop.Run) -> None:
        """Give the engines the trainer's weights, and make sure that both compute the same, before
        the first step."""
        trainer = self._trainer
        await trainer.connect_engines(self.session.builder.engine_addresses(self.engines))
        version = version_of(run.step)
        if self.checkpoint is None:
            await self.saver.save(trainer, step=0, prompt_position=0)
        await run.devices.publish(version, verify=self.recipe.weights.verify)
        self.bus.emit(
            PhaseStarted(phase="check", detail="engine and trainer score the same answers")
        )
        check = truth.Check(
            devices=run.devices,
            silencer=trainer,
            plan=self.plan,
            num_layers=self.material.facts.num_layers,
            temperature=self.recipe.rollout.temperature,
            seed=self.recipe.run.seed,
            routing_replay=self.recipe.train.routing_replay,
        )
        prompts = self.material.heldout or self.material.prompts.prompts
        self.bus.emit(await check.run(prompts[: truth.NUM_PROMPTS]))
        if self.checkpoint is None:
            await self.stop.unless_set(self._evaluate(0))

    @property
    def _trainer(self) -> RankGroup:
        assert self.run is not None and isinstance(self.run.trainer, RankGroup), "no trainer yet"
        return self.run.trainer

    async def _save(self, step: int) -> None:
        await self.saver.save(self._trainer, step=step, prompt_position=self.collector.position)

    async def _save_and_stop(self) -> None:
        """Save what was learned since the newest checkpoint, then say how to go on."""
        path = self.session.run.shown
        if self.run is None:
            raise Stopped(
                "stopped before the first step",
                why="Ctrl-C or SIGTERM; nothing was trained yet",
                fix=f"miles resume {path}",
            )
        await self.saver.settle()
        if self.run.step > (self.saver.newest_step or 0):
            async with self.run.devices.training():  # a colocated trainer sleeps after each publish
                await self._save(self.run.step)
                await self.saver.settle()
        raise Stopped(
            f"stopped after step {self.run.step}, and saved",
            why="Ctrl-C or SIGTERM",
            fix=f"miles resume {path}",
        )

    async def _evaluate(self, step: int) -> None:
        if self.material.heldout:
            self.bus.emit(
                PhaseStarted(phase="eval", detail=f"{len(self.material.heldout)} held-out prompts")
            )
            self.bus.emit(await self.evaluator.run(step))

    def _keep(self, step: int, groups: list[Group]) -> None:
        folder = self.session.run.rollouts_dir
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
