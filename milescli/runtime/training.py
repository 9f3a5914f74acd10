"""Trains one policy within an attempt: that of the run, or one of several adapters. A training has
its own steps, events and checkpoints; its processes belong to the attempt."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.checkpoint.store import CheckpointStore, StoredCheckpoint, needs_nothing
from milescli.core.concurrency import in_thread
from milescli.core.events import Event, EventBus
from milescli.rollout.episode.episode import evaluation_episodes
from milescli.runtime.devices import Devices
from milescli.runtime.evaluation.evaluator import Evaluator
from milescli.runtime.group_work import GroupWork
from milescli.runtime.loop import Hooks, Run, learn
from milescli.runtime.recording.sample_journal import SampleJournal
from milescli.runtime.recording.side_files import SideFiles
from milescli.runtime.recording.user_hooks import UserHooks
from milescli.runtime.recovery.mirror import Mirror
from milescli.runtime.recovery.rank_group import RankGroup
from milescli.runtime.row_work import RowWork
from milescli.runtime.saving import Progress, Saver
from milescli.runtime.sources import Demonstrations, Source
from milescli.runtime.spec import RunSpec
from milescli.train.base import Objective, Trainer, is_adaptive
from milescli.train.objectives import load_in_driver, load_objective

if TYPE_CHECKING:
    from milescli.runtime.attempt import Attempt


class Training:
    """Takes one sequence of steps, from its initial weights to its last checkpoint."""

    def __init__(
        self, attempt: Attempt, spec: RunSpec, *, bus: EventBus, adapter: str | None = None
    ) -> None:
        """Set up a training. `adapter`: the one of several that it trains; None: the run trains one
        policy."""
        self.attempt, self.spec, self.bus, self.adapter = attempt, spec, bus, adapter
        recipe = spec.recipe
        keeps = recipe.keeps_reference or recipe.caches_reference
        store = CheckpointStore(
            spec.run.checkpoints,
            keep=recipe.checkpoint.keep,
            needs=(lambda step: {0, recipe.reference_step(step)}) if keeps else needs_nothing,
        )
        self.side = attempt.side if adapter is None else SideFiles(bus)
        self.user = UserHooks(recipe)
        self.mirror = Mirror.of(recipe, spec.run, store)
        """None: the checkpoints are copied nowhere."""
        self.saver = Saver(
            store=store, spec=spec, bus=bus, call_hook=self.user.call, mirror=self.mirror
        )
        self.saver.newest_step = spec.checkpoint.step if spec.checkpoint else None
        self.warm_up: Run | None = None
        """The warm-up in memory; None: there is none, or it has not begun."""
        self.run: Run | None = None
        self.journal: SampleJournal | None = None
        """None: no samples are kept, or nothing runs yet."""
        self.work = RowWork(self) if recipe.learns_from_rows else GroupWork(self)

    @property
    def step(self) -> int:
        """Return the number of completed steps."""
        return self.run.step if self.run is not None else self.spec.first_step

    @property
    def has_learned(self) -> bool:
        """Return True if there is something to save: steps, or a part of the warm-up."""
        return self.run is not None or (self.warm_up is not None and self.warm_up.step > 0)

    @property
    def reached(self) -> str:
        """Return the last completed step, for people."""
        if self.run is None and self.warm_up is not None:
            return f"step {self.warm_up.step} of the warm-up"
        return f"step {self.step}"

    async def begin(self, trainer: Trainer) -> None:
        """Load the initial weights into the ranks: those of the checkpoint, or those of the model
        after its warm-up."""
        recipe, checkpoint = self.spec.recipe, self.spec.checkpoint
        if checkpoint is not None:
            await self.work.prepare(trainer)
            await self._load(trainer, checkpoint)
            trainer.note_saved()
            return
        if recipe.warmup.steps:
            await self._warm_up(trainer)
        if recipe.has_critic and recipe.train.critic.path is None:
            await trainer.start_critic()
        await self.work.prepare(trainer)
        if recipe.keeps_reference:
            await trainer.freeze_reference()

    async def _warm_up(self, trainer: Trainer) -> None:
        """Take the supervised steps of the warm-up with the same trainer; they need no engine.
        Continues where the run was stopped; the optimizer's state is reset afterwards."""
        source, begun = Demonstrations(self.spec.recipe, self.spec.inputs.demonstrations), 0
        if (saved := self.spec.saved_in_warm_up) is not None:
            await trainer.load(saved.path)
            begun = saved.manifest.warmup_steps or 0
        self.warm_up = Run(
            plan=self.spec.plan,
            bus=self.bus,
            source=source,
            objective=load_objective(source.objective, self.spec.recipe),
            trainer=trainer,
            devices=None,
            hooks=Hooks(done=self.track),
            stop=self.attempt.stop,
            step=begun,
        )
        await learn(self.warm_up)
        await trainer.reset_optimizer()

    async def live(self, trainer: Trainer, fleet: SglangFleet | None) -> None:
        """Take all steps. `fleet`: None if the plan has no engines."""
        await self.work.learn(trainer, fleet)
        await self.attempt.profiler.finish(self.step, loop=self)

    async def load_newest(self, ranks: RankGroup) -> None:
        """Load the newest checkpoint into new ranks, if there is one."""
        if self.adapter is not None:
            await ranks.call("take_turn", self.adapter)
        if (step := self.saver.newest_step) is not None:
            await self._load(ranks, await in_thread(lambda: self.saver.store.find(step)))

    async def _load(self, trainer: Trainer, checkpoint: StoredCheckpoint) -> None:
        """Load weights, optimizer and RNG of a checkpoint, and its reference."""
        if self.spec.recipe.keeps_reference:
            step = self.spec.recipe.reference_step(checkpoint.step)
            reference = await in_thread(lambda: self.saver.store.find(step))
            await trainer.load(reference.path, weights_only=True)
            await trainer.freeze_reference()
        await trainer.load(checkpoint.path)

    def evaluator(self, parts: Mapping[str, Any]) -> Evaluator:
        """Return the evaluator of the engines' weights. `parts`: see `episode_parts`."""
        return Evaluator(
            recipe=self.spec.recipe,
            prompts=self.spec.inputs.heldout,
            episodes=evaluation_episodes(self.spec.recipe, **parts),
            folder=self.spec.run.eval_dir,
            side=self.side,
            tell=parts.get("tell"),
        )

    @cached_property
    def objective(self) -> Objective[Any]:
        """Return the run's objective, in the state of the checkpoint."""
        objective = load_in_driver(self.spec.recipe.train.objective, self.spec.recipe)
        if self.spec.checkpoint is not None and is_adaptive(objective):
            objective.restore(self.spec.checkpoint.manifest.objective)
        return objective

    def new_run(
        self, source: Source, trainer: Trainer, devices: Devices | None, **hooks: Any
    ) -> Run:
        """Return the Run for the loop. `hooks`: those of the kind of source."""
        return Run(
            plan=self.spec.plan,
            bus=self.bus,
            source=source,
            objective=self.objective,
            trainer=trainer,
            devices=devices,
            hooks=Hooks(
                between=self._between,
                save=self._save_where_due,
                evaluate=self._evaluate_where_due,
                **{"done": self.track, **hooks},
            ),
            stop=self.attempt.stop,
            step=self.step,
        )

    async def _between(self, step: int) -> None:
        """Let a profile start or end."""
        await self.attempt.profiler.between(step, loop=self)

    async def track(self, event: Event, *_: object) -> None:
        """Pass an event on to the user's tracker."""
        await self.user.call("tracker", event=event)

    async def _save_where_due(self, step: int) -> None:
        """Save as often as the recipe says. Weights that become the reference are saved, too."""
        assert self.run is not None, "nothing runs yet"
        recipe = self.spec.recipe
        if _is_due(step, recipe.train.reference_every):
            await self.run.trainer.freeze_reference()
            await self.save(step)
        elif _is_due(step, recipe.checkpoint.every) or step == recipe.train.steps:
            await self.save(step)

    async def _evaluate_where_due(self, step: int) -> None:
        recipe = self.spec.recipe
        if self.attempt.stop.is_after_step and step < recipe.train.steps:
            return  # the next thing is the save
        if _is_due(step, recipe.eval.every) or step == recipe.train.steps:
            await self.work.evaluate(step)

    async def save(self, step: int) -> None:
        """Start checkpoint `step`; `Saver.settle` completes it."""
        run = self.run
        assert run is not None, "nothing runs yet"
        progress = await in_thread(run.source.progress)
        if is_adaptive(run.objective):
            progress = replace(progress, objective=dict(run.objective.state))
        await self.saver.save(run.trainer, step=step, progress=progress)
        if self.journal is not None:
            self.journal.checkpoint()

    async def save_last(self) -> None:
        """Save what was learned since the newest checkpoint; if no step was taken, save the warm-up
        so far as step 0."""
        await self.saver.settle()
        newest = self.saver.newest_step
        if (run := self.run) is None:
            assert self.warm_up is not None, "nothing was learned yet"
            progress = Progress(warmup_steps=self.warm_up.step)
            await self.saver.save(self.warm_up.trainer, step=0, progress=progress)
            await self.saver.settle()
        elif newest is None or run.step > newest:
            # a colocated trainer sleeps after each publish
            async with run.devices.scoring() if run.devices is not None else nullcontext():
                await self.save(run.step)
            await self.saver.settle()
        self.saver.require_saved(self.step)

    async def close(self) -> None:
        """Close the journal; its written records stay."""
        if (journal := self.journal) is not None:
            await in_thread(journal.close)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
