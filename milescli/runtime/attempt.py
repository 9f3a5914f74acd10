"""One attempt at a run, whatever it learns from: starts the trainer, supervises, saves, ends clean,
and begins again where nodes join. `reinforce_attempt` and `row_attempt` say what is learned."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Protocol, TypeVar

from milescli.agents.foreign.host import close_hosts
from milescli.agents.mcp_tools import close_servers
from milescli.backends.ray.nodes import living_nodes
from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.checkpoint.store import CheckpointStore, StoredCheckpoint
from milescli.cluster.node_loss import for_nodes
from milescli.cluster.nodes import RunNodes, choose_nodes
from milescli.core.concurrency import in_thread
from milescli.core.errors import MilesError, NodesJoined, Stopped
from milescli.core.events import EventBus, Notice, PhaseStarted, RunEnded
from milescli.core.silence import Silence
from milescli.runtime.devices import Devices
from milescli.runtime.planning import plan_without_plugins
from milescli.runtime.recording.profiler import Profiler
from milescli.runtime.recording.side_files import SideFiles
from milescli.runtime.recording.user_hooks import UserHooks
from milescli.runtime.recovery.engine_keepers import EngineKeeper, RouterKeeper, keep_scorer
from milescli.runtime.recovery.engines import Engines
from milescli.runtime.recovery.healing_trainer import AdapterTrainer, HealingTrainer
from milescli.runtime.recovery.peer_copies import Copies, keepers_of_ranks, start_keepers
from milescli.runtime.recovery.rank_group import RankGroup
from milescli.runtime.recovery.restarts import Repairs, Restarts, until_started
from milescli.runtime.recovery.supervise import (
    Probe,
    StartWatch,
    StopFlag,
    StopSignals,
    run_watched,
)
from milescli.runtime.row_loop import warm_up
from milescli.runtime.saving import Progress, Saver
from milescli.runtime.session import RunSession
from milescli.runtime.spec import RunSpec
from milescli.train.base import Trainer
from milescli.workers.isolated import close_lanes

T = TypeVar("T")


class InMemory(Protocol):
    """The parts of a run in memory that an attempt uses."""

    step: int
    trainer: Trainer
    devices: Devices | None


class Attempt:
    """Holds what is running, from the first actor to the last."""

    def __init__(self, spec: RunSpec, *, session: RunSession, bus: EventBus) -> None:
        self.spec, self.session, self.bus = spec, session, bus
        self.engines = Engines()
        self.trainer: HealingTrainer | None = None
        restarts = Restarts(limits=spec.recipe.fault)
        self.repairs = Repairs(bus=bus, restarts=restarts, step=lambda: self.step)
        self.probes: list[Probe] = []
        self._num_watchdogs = 0
        """Successors that were told of."""
        self.run: InMemory | None = None
        recipe = spec.recipe
        store = CheckpointStore(
            spec.run.checkpoints,
            keep=recipe.checkpoint.keep,
            protect={0, recipe.reference_step(spec.first_step)}
            if recipe.keeps_reference or recipe.caches_reference
            else set(),
        )
        self.user = UserHooks(recipe)
        self.saver = Saver(store=store, spec=spec, bus=bus, tell=self.user.tell)
        self.saver.newest_step = spec.checkpoint.step if spec.checkpoint else None
        self.probes.append(self.saver.probe)
        self.side = SideFiles(bus)
        self.stop = StopFlag()
        self.profiler = Profiler(
            spec.run, trainer=lambda: self.trainer, engines=lambda: self.engines.actors, bus=bus
        )

    @property
    def step(self) -> int:
        """Steps done."""
        return self.run.step if self.run else self.spec.first_step

    @property
    def asks_teachers(self) -> bool:
        """True if the trainer holds the run's teachers, where it has any."""
        return True

    @property
    def taking_turns(self) -> bool:
        """Engines and trainer share device memory, so that the trainer can only start beside
        sleeping engines."""
        plan = self.spec.plan
        return bool(plan.engines.num) and plan.colocated and plan.device_kind != "cpu"

    @property
    def saved_step(self) -> int | None:
        """Return the step of the newest checkpoint that a resumed run would go on from."""
        return self.saver.newest_step

    @property
    def has_begun(self) -> bool:
        """True if all processes are there, and there is something to stop."""
        return self.run is not None

    async def main(self) -> None:
        """The whole attempt, watched."""
        try:
            command = f"miles resume {self.spec.run.shown}"
            signals = StopSignals(on_stop=self._on_stop, again=command)
            await run_watched(
                self._begin(), self.probes, signals, cause_grace_s=self.session.cause_grace_s
            )
        finally:
            await self.saver.close()
            if self.trainer is not None:
                await self.trainer.close()
            await self.engines.stop()
            await asyncio.to_thread(close_lanes)
            await asyncio.to_thread(close_servers)
            await asyncio.to_thread(close_hosts)
            await self.session.resources.release()

    def _on_stop(self) -> bool:
        if not self.has_begun:
            return False
        self.bus.emit(
            PhaseStarted(
                phase="stop",
                detail="finishing what is half done, then saving; once more ends at once",
            )
        )
        self.stop.set()
        return True

    async def _begin(self) -> None:
        """Trainer and engines start side by side, and what comes before the first step does not
        wait for the engines, where the devices allow it."""
        plan = self.spec.plan
        detail = f"{plan.trainer.world_size} trainer ranks, {plan.engines.num} engines"
        self.bus.emit(PhaseStarted(phase="start", detail=detail))
        self.probes += [self._check_ray, self._check_watchdog, self._watch_start()]
        await self.session.resources.take(timeout_s=self.spec.recipe.machine.start_timeout_s)
        self.probes.append(self.session.cluster.check_nodes)
        if self.spec.wished is not None:
            self.probes.append(JoiningNodes(self.spec, stop=self.stop, bus=self.bus).probe)
        engines = asyncio.ensure_future(self._start_engines())
        self.probes.append(_failure_of(engines))
        try:
            if self.taking_turns:
                await _there(await engines).sleep()
            trainer = await self._start_trainer()
            fleet = await engines
            if fleet is not None:
                self.probes.append(self.engines.probe)
            await self.work(trainer, fleet)
            await self.profiler.finish(self.step)
        except Stopped as stopped:
            await self.settle()
            await self.profiler.finish(self.step)
            await self.save_and_stop(stopped)
        finally:
            self.profiler.leave()
            engines.cancel()
            await asyncio.gather(engines, return_exceptions=True)
            await self.engines.leave()
            await self.settle()
        await self.saver.settle()
        self.saver.require_saved(self.step)

    def _watch_start(self) -> Probe:
        return StartWatch(
            self.session.resources.token,
            silence_s=self.spec.recipe.machine.silence_s,
            bus=self.bus,
            is_over=lambda: self.has_begun,
        ).probe

    async def _check_ray(self) -> None:
        for news in self.session.ray.news(self.step):
            self.bus.emit(news)
        await self.session.ray.check()

    async def _check_watchdog(self) -> None:
        if (number := self.session.watchdog.num_replaced) > self._num_watchdogs:
            self._num_watchdogs = number
            text = "the watchdog ended, or was stopped; another has taken its place"
            self.bus.emit(Notice(text=text, level="warning"))

    async def work(self, trainer: Trainer, fleet: SglangFleet | None) -> None:
        """Learn to the last step. `fleet`: None where the plan has no engines."""
        raise NotImplementedError

    def tell_end(self, event: RunEnded) -> None:
        """Emit how the attempt ended."""
        self.bus.emit(event)

    async def settle(self) -> None:
        """End what runs beside the steps. May be called more than once."""

    async def between_steps(self, step: int) -> None:
        await self.profiler.between(step, loop=self)

    def keep_engines(self, fleet: SglangFleet, devices: Devices) -> EngineKeeper:
        """From now on, replace a dead engine of this fleet."""
        keeper = EngineKeeper(
            fleet,
            indices=self.session.builder.indices_of(devices.fleet),
            engines=self.engines,
            builder=self.session.builder,
            repairs=self.repairs,
            join=devices.replace,
        )
        self.engines.keepers.append(keeper)
        if fleet is self.engines.fleet and self.engines.router is not None:
            self.engines.keepers.append(
                RouterKeeper(
                    fleet,
                    engines=self.engines,
                    repairs=self.repairs,
                    silence=Silence(worker="router", bound_s=self.spec.recipe.machine.silence_s),
                )
            )
        return keeper

    def progress(self) -> Progress:
        """Return what a checkpoint records of the run beside the weights."""
        raise NotImplementedError

    async def prepare(self, trainer: Trainer) -> None:
        """What a run that begins does with its trainer before anything else: its warm-up."""
        if self.spec.recipe.warmup.steps:
            await warm_up(
                recipe=self.spec.recipe,
                plan=self.spec.plan,
                trainer=trainer,
                demonstrations=self.spec.inputs.demonstrations,
                bus=self.bus,
                stop=self.stop,
                tell=self.user.tell,
            )
        if self.spec.recipe.has_critic and self.spec.recipe.train.critic.path is None:
            await trainer.start_critic()

    async def recall(self, trainer: Trainer) -> None:
        """What a run that is resumed does with its trainer before the checkpoint is loaded."""

    async def _until_started(self, name: str, start: Callable[[], Awaitable[T]]) -> T:
        return await until_started(name, start, repairs=self.repairs)

    async def _start_engines(self) -> SglangFleet | None:
        if not self.spec.plan.engines.num:
            return None
        builder = self.session.builder
        fleet = await builder.start_engines(self.engines, until_started=self._until_started)
        keep_scorer(self.engines, builder, repairs=self.repairs)
        return fleet

    async def _start_trainer(self) -> Trainer:
        trainer = await self._start_ranks()
        self.saver.on_complete, self.saver.on_give_up = trainer.is_saved, trainer.is_given_up
        await self.begin_with(trainer)
        return trainer

    async def begin_with(self, trainer: HealingTrainer | AdapterTrainer) -> None:
        """Give the ranks the weights to begin from: of the checkpoint, or of the model after its
        warm-up."""
        recipe, checkpoint = self.spec.recipe, self.spec.checkpoint
        if checkpoint is None:
            await self.prepare(trainer)
            if recipe.keeps_reference:
                await trainer.freeze_reference()
            return
        await self.recall(trainer)
        await self._load(trainer, checkpoint)
        trainer.is_saved()

    async def _start_ranks(self) -> HealingTrainer:
        """Start the trainer's ranks, which are replaced where they die."""
        start = partial(self.session.builder.start_trainer, with_teachers=self.asks_teachers)
        trainer = self.trainer = HealingTrainer(
            await self._until_started("trainer", start),
            restart=self._restart_ranks,
            repairs=self.repairs,
            silence_s=self.spec.recipe.machine.silence_s,
            room=self._room if self.taking_turns else None,
            copies=self._copies(),
        )
        self.probes.append(trainer.probe)
        return trainer

    def _copies(self) -> Copies | None:
        """Make the copies of the ranks' state, where the recipe wants some. Their keepers start
        beside what follows."""
        every = self.spec.recipe.fault.copy_every
        if not every:
            return None
        copies = Copies(
            every=every,
            start_keepers=partial(start_keepers, self.session.builder),
            start_ranks=self._start_bare_ranks,
            keeper_of_rank=keepers_of_ranks(self.spec.plan),
            repairs=self.repairs,
            silence_s=self.spec.recipe.machine.silence_s,
        )
        copies.start()
        return copies

    def _room(self) -> AbstractAsyncContextManager[None]:
        """Make room for ranks on the devices: before there is a run, its engines sleep."""
        devices = self.run.devices if self.run is not None else None
        return devices.room_for_ranks() if devices is not None else nullcontext()

    async def _restart_ranks(self) -> RankGroup:
        """New ranks, with what the newest checkpoint of this past has, or the model where there is
        none yet."""
        ranks = await self._start_bare_ranks()
        await self.load_newest(ranks)
        return ranks

    async def load_newest(self, ranks: RankGroup) -> None:
        """Give new ranks what the newest checkpoint has, where there is one."""
        if (step := self.saver.newest_step) is not None:
            await self._load(ranks, await in_thread(lambda: self.saver.store.find(step)))

    async def _start_bare_ranks(self) -> RankGroup:
        """Start ranks with the weights of the model as it is given. A checkpoint whose manifest is
        being written counts by then."""
        await self.saver.completed()
        return await self.session.builder.start_trainer(with_teachers=self.asks_teachers)

    async def _load(self, trainer: Trainer, checkpoint: StoredCheckpoint) -> None:
        """Weights, optimizer and RNG of a checkpoint, and the reference that it had."""
        if self.spec.recipe.keeps_reference:
            step = self.spec.recipe.reference_step(checkpoint.step)
            reference = await in_thread(lambda: self.saver.store.find(step))
            await trainer.load(reference.path, weights_only=True)
            await trainer.freeze_reference()
        await trainer.load(checkpoint.path)

    async def save(self, step: int) -> None:
        """Begin checkpoint `step`; `Saver.settle` completes it."""
        assert self.run is not None, "nothing runs yet"
        progress = await in_thread(self.progress)
        await self.saver.save(self.run.trainer, step=step, progress=progress)
        if self.spec.recipe.keeps_reference:
            # what a resumed run takes its reference from is not forgotten
            self.saver.store.protect = {0, self.spec.recipe.reference_step(step)}

    async def save_last(self) -> None:
        """Save as `save` does, with the trainer awake."""
        await self.save(self.step)

    async def save_and_stop(self, stopped: Stopped) -> None:
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
            await self.save_last()
            await self.saver.settle()
        self.saver.require_saved(self.run.step)
        if isinstance(stopped, NodesJoined):
            raise stopped
        raise Stopped(
            f"stopped after step {self.run.step}, and saved", why="Ctrl-C or SIGTERM", fix=command
        )


def _there(fleet: SglangFleet | None) -> SglangFleet:
    assert fleet is not None, "engines that take turns with a trainer"
    return fleet


def _failure_of(starting: asyncio.Future[SglangFleet | None]) -> Probe:
    """Engines that fail to start end the run at once, and not after the warm-up."""

    async def probe() -> None:
        if starting.done() and not starting.cancelled() and (error := starting.exception()):
            raise error

    return probe


LOOK_EVERY_S = 5.0
"""Also how long a node has been there before it is asked anything."""


class JoiningNodes:
    """Belongs to one attempt, whose spec has a `wished`."""

    def __init__(self, spec: RunSpec, *, stop: StopFlag, bus: EventBus) -> None:
        """`stop`: of the loop; `bus` is told of a node that cannot be used, once."""
        self._spec, self._stop, self._bus = spec, stop, bus
        self._known = {member.node.node_id for member in spec.nodes.chosen}
        """Nodes of the run, and those that were looked at and left alone."""
        self._seen = set[str]()
        """In the last look."""
        self._looked_at = time.monotonic()
        self._is_over = False

    async def probe(self) -> None:
        """Look who has joined. Never raises for what a new node is or lacks."""
        if self._is_over or time.monotonic() - self._looked_at < LOOK_EVERY_S:
            return
        there = {node.node_id for node in await in_thread(living_nodes)}
        settled, self._seen, self._looked_at = there & self._seen, there, time.monotonic()
        self._known &= there
        if not settled - self._known:
            return
        self._known |= settled
        try:
            nodes = await in_thread(lambda: self._usable(len(settled)))
        except MilesError as error:
            text = f"the cluster has other nodes, which the run does not take: {error.what}"
            self._bus.emit(Notice(text=f"{text}: {error.why}", level="warning"))
            return
        if len(nodes.chosen) > len(self._spec.nodes.chosen):
            self._is_over = True
            self._stop.set_joined(self._joined(nodes))

    def _usable(self, num_nodes: int) -> RunNodes:
        """Raises MilesError where a run could not begin with so many nodes."""
        wished = self._spec.wished
        assert wished is not None, "a run that has all its nodes looks for none"
        loaded = for_nodes(min(num_nodes, wished.recipe.machine.nodes), wished)
        nodes = choose_nodes(loaded.recipe.machine)
        machine = nodes.machine.when_idle()  # the run itself is what holds its memory
        plan_without_plugins(loaded, machine, facts=self._spec.inputs.facts)
        inputs = self._spec.inputs
        nodes.require_shared(self._spec.run.path, inputs.model_dir, *inputs.teacher_dirs)
        return nodes

    def _joined(self, nodes: RunNodes) -> NodesJoined:
        own = {member.node.node_id for member in self._spec.nodes.chosen}
        new = [str(member.node) for member in nodes.chosen if member.node.node_id not in own]
        return NodesJoined(
            f"{', '.join(new)} joined",
            why=f"the run has {len(own)} of the nodes that it wants, and can have "
            f"{len(nodes.chosen)}; it was saved, and begins again with them",
            fix=f"miles resume {self._spec.run.shown}",
        )
