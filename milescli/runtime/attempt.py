"""Runs one attempt at a run: starts and supervises its processes, lets each `training` take its
steps, saves, shuts down cleanly, and restarts when nodes join."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from milescli.agents.foreign.host import close_hosts
from milescli.agents.mcp_tools import close_servers
from milescli.backends.ray.nodes import living_nodes
from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.checkpoint.run_dir import resume_command
from milescli.cluster.node_loss import with_num_nodes
from milescli.cluster.nodes import RunNodes, choose_nodes
from milescli.core.concurrency import in_thread
from milescli.core.errors import MilesError, NodesJoined, Stopped
from milescli.core.events import EventBus, Notice, PhaseStarted, RunEnded
from milescli.runtime.adapters import AdapterDevices, adapter_trainings, train_together
from milescli.runtime.devices import Devices
from milescli.runtime.planning import plan_without_plugins
from milescli.runtime.recording.profiler import Profiler
from milescli.runtime.recording.side_files import SideFiles
from milescli.runtime.recovery.engine_keepers import (
    EngineKeeper,
    Join,
    WatchedFleet,
    keep_engines,
    keep_scorer,
)
from milescli.runtime.recovery.engines import Engines
from milescli.runtime.recovery.healing_trainer import HealingTrainer
from milescli.runtime.recovery.mirror import Mirror
from milescli.runtime.recovery.peer_copies import Copies, keepers_of_ranks, start_keepers
from milescli.runtime.recovery.preemption import PaceEstimate, Preemption, PreemptionWatch
from milescli.runtime.recovery.rank_group import RankGroup
from milescli.runtime.recovery.restarts import Repairs, Restarts, retry_start
from milescli.runtime.recovery.supervise import (
    Probe,
    StartWatch,
    StopFlag,
    StopSignals,
    run_watched,
)
from milescli.runtime.session import RunSession
from milescli.runtime.spec import RunSpec
from milescli.runtime.training import Training
from milescli.train.base import Trainer
from milescli.workers.isolated import close_lanes

T = TypeVar("T")


class Attempt:
    """Holds the running processes of an attempt, from the first actor to the last."""

    def __init__(self, spec: RunSpec, *, session: RunSession, bus: EventBus) -> None:
        self.spec, self.session, self.bus = spec, session, bus
        self.engines, self.stop, self.side = Engines(), StopFlag(), SideFiles(bus)
        self.trainer: HealingTrainer | None = None
        restarts = Restarts(limits=spec.recipe.fault)
        self.repairs = Repairs(bus=bus, restarts=restarts, step=lambda: self.step)
        self.profiler = Profiler(
            spec.run, trainer=lambda: self.trainer, engines=lambda: self.engines.actors, bus=bus
        )
        self.trainings = (
            adapter_trainings(self) if spec.adapters else [Training(self, spec, bus=bus)]
        )
        """One; or one for each of several adapters."""
        self._pace = PaceEstimate()
        bus.listeners.append(self._pace)
        self._preemption: Preemption | None = None
        """The notice that this machine is taken away; None: there was none."""
        self.probes: list[Probe] = [one.saver.probe for one in self.trainings]
        self._changing, self._turn = asyncio.Lock(), asyncio.Lock()
        """Of adapters: see `AdapterDevices`."""
        self._num_watchdogs = 0
        """Replacements of the watchdog that were reported."""

    @property
    def step(self) -> int:
        """Return the number of completed steps; with several adapters, the smallest."""
        return min(one.step for one in self.trainings)

    @property
    def saved_step(self) -> int | None:
        """Return the step of the newest checkpoint from which a resumed run would continue; with
        several adapters, that of the one furthest behind among those with steps left to do."""
        left = [one for one in self.trainings if one.saver.newest_step != one.spec.num_steps]
        saved = [one.saver.newest_step for one in left or self.trainings]
        return None if None in saved else min(step for step in saved if step is not None)

    @property
    def mirrors(self) -> list[Mirror]:
        """Return the mirrors that copy checkpoints to an object store; empty if there are none."""
        return [one.mirror for one in self.trainings if one.mirror is not None]

    @property
    def shares_memory(self) -> bool:
        """Return True if engines and trainer share device memory, so that the trainer can only
        start while the engines sleep."""
        plan = self.spec.plan
        return bool(plan.engines.num) and plan.colocated and plan.device_kind != "cpu"

    @property
    def has_begun(self) -> bool:
        """Return True if all processes run, and there is something to stop."""
        return any(one.run is not None for one in self.trainings)

    async def main(self) -> None:
        """Run the whole attempt under supervision, and release its processes at the end."""
        try:
            signals = StopSignals(
                on_stop=self._on_stop, resume_command=self._resume, on_notice=self._on_notice
            )
            with self._preemption_watched(signals):
                await run_watched(
                    self._begin(), self.probes, signals, cause_grace_s=self.session.cause_grace_s
                )
        finally:
            try:
                await self._release()
            finally:
                for one in self.trainings:
                    await one.close()

    async def _release(self) -> None:
        for one in self.trainings:
            await one.saver.close()
        for mirror in self.mirrors:
            mirror.close()
        if self.trainer is not None:
            await self.trainer.close()
        await self.engines.stop()
        await asyncio.to_thread(close_lanes)
        await asyncio.to_thread(close_servers)
        await asyncio.to_thread(close_hosts)
        await self.session.resources.release()
        for one in self.trainings:
            await one.saver.discard_unfinished()

    def _resume(self) -> str:
        """Return the command that continues the run after this attempt."""
        step, num_steps = self.saved_step, self.spec.num_steps
        return resume_command(self.spec.run.shown, step=step, num_steps=num_steps)

    def _on_stop(self) -> bool:
        if not any(one.has_learned for one in self.trainings):
            return False
        self.bus.emit(
            PhaseStarted(
                phase="stop",
                detail="finishing the current work, then saving; a second signal ends the run "
                "at once",
            )
        )
        self.stop.set()
        return True

    def _on_notice(self, notice: Preemption) -> bool:
        """Finish the step if it and a save fit before the deadline, else save at once. The step
        never continues beyond the point where a save would still fit."""
        if not any(one.has_learned for one in self.trainings):
            return False
        self._preemption, self.stop.why = notice, notice.why
        left_s = notice.deadline_s - time.time() - self._pace.save_s
        finishes = self._pace.step_left_s <= left_s
        if finishes:
            self.stop.is_after_step = True
            asyncio.get_running_loop().call_later(left_s, self.stop.set)
        else:
            self.stop.set()
        what = "finishing the current step, then saving" if finishes else "saving at once"
        self.bus.emit(PhaseStarted(phase="stop", detail=f"{notice.why}: {what}"))
        return True

    @contextmanager
    def _preemption_watched(self, signals: StopSignals) -> Iterator[None]:
        """Poll the cloud for preemption notices within the context, if the recipe names a cloud."""
        if (cloud := self.spec.recipe.machine.preemption) == "none":
            yield
            return
        loop = asyncio.get_running_loop()

        def here(call: Callable[[T], object], argument: T) -> None:
            with suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(call, argument)

        watch = PreemptionWatch(
            cloud,
            environ=os.environ,
            on_notice=lambda notice: here(signals.notify, notice),
            on_trouble=lambda text: here(self.bus.emit, Notice(text=text, level="warning")),
        )
        watch.start()
        try:
            yield
        finally:
            watch.close()

    async def _begin(self) -> None:
        """Start trainer and engines side by side. Work before the first step does not wait for the
        engines if the devices allow it."""
        plan = self.spec.plan
        detail = f"{plan.trainer.world_size} trainer ranks, {plan.engines.num} engines"
        self.bus.emit(PhaseStarted(phase="start", detail=detail))
        self.probes += [self._check_ray, self._check_watchdog, self._watch_start()]
        for mirror in self.mirrors:
            mirror.begin()
            self.probes.append(partial(self._watch_mirror, mirror))
        await self.session.resources.take(timeout_s=self.spec.recipe.machine.start_timeout_s)
        self.probes.append(self.session.cluster.check_nodes)
        if self.spec.full_recipe is not None:
            self.probes.append(JoiningNodes(self.spec, stop=self.stop, bus=self.bus).probe)
        engines = asyncio.ensure_future(self._start_engines())
        self.probes.append(_failure_of(engines))
        try:
            if self.shares_memory:
                await _require_fleet(await engines).sleep()
            trainer = await self._start_trainer()
            fleet = await self.stop.unless_set(_result_of(engines))
            if fleet is not None:
                self.probes.append(self.engines.probe)
            if self.spec.adapters:
                await train_together(self, trainer)
            else:
                await self.trainings[0].live(trainer, fleet)
            await self.profiler.finish(self.step)
        except Stopped as stopped:
            await self._settle()
            await self.profiler.finish(self.step)
            await self.save_and_stop(stopped)
        finally:
            self.profiler.leave()
            engines.cancel()
            await asyncio.gather(engines, return_exceptions=True)
            await self.engines.leave()
            await self._settle()
        for one in self.trainings:
            await one.saver.settle()
            one.saver.require_saved(one.step)
        await self._finish_mirrors(lambda: self.stop.is_set)

    def _watch_start(self) -> Probe:
        return StartWatch(
            self.session.resources.token,
            silence_s=self.spec.recipe.machine.silence_s,
            bus=self.bus,
            is_over=lambda: self.has_begun,
        ).probe

    async def _check_ray(self) -> None:
        for warning in self.session.ray.warnings(self.step):
            self.bus.emit(warning)
        await self.session.ray.check()

    async def _check_watchdog(self) -> None:
        if (number := self.session.watchdog.num_replaced) > self._num_watchdogs:
            self._num_watchdogs = number
            text = "the watchdog ended or was stopped; a new one has started"
            self.bus.emit(Notice(text=text, level="warning"))

    async def _watch_mirror(self, mirror: Mirror) -> None:
        mirror.emit_news(self.bus)

    async def _finish_mirrors(self, gives_up: Callable[[], bool] = lambda: False) -> None:
        """Wait for the last copies, at most for the step timeout or until the machine goes away."""
        bound_s = self.spec.recipe.machine.step_timeout_s
        if self._preemption is not None:
            bound_s = min(bound_s, max(0.0, self._preemption.deadline_s - time.time()))
        for mirror in self.mirrors:
            await mirror.finish(self.bus, bound_s=bound_s, gives_up=gives_up)

    async def _settle(self) -> None:
        for one in self.trainings:
            await one.work.settle()

    def report_end(self, event: RunEnded) -> None:
        """Emit how the attempt ended."""
        for one in self.trainings:
            if one.adapter is not None:
                one.bus.emit(replace(event, step=one.step))
        self.bus.emit(event)

    def devices_of(self, training: Training, trainer: Trainer, fleet: SglangFleet) -> Devices:
        """Return the object that gives the devices to the trainer and its engines in turn. Adapters
        share the locks: only one at a time changes the engines."""
        share = 1.0 if self.shares_memory else self.spec.recipe.weights.wave_share
        if training.adapter is not None:
            return AdapterDevices(
                shares_memory=False,
                trainer=trainer,
                engines=fleet,
                wave_share=share,
                changing=self._changing,
                turn=self._turn,
            )
        return Devices(
            shares_memory=self.shares_memory,
            trainer=trainer,
            engines=fleet,
            engines_asleep=self.shares_memory,
            wave_share=share,
        )

    def keep_engines(self, fleet: WatchedFleet, name: str, *, join: Join) -> EngineKeeper:
        """Start replacing dead engines of the fleet with this name."""
        engines, builder = self.engines, self.session.builder
        return keep_engines(fleet, name, engines, builder, repairs=self.repairs, join=join)

    async def _retry_start(self, name: str, start: Callable[[], Awaitable[T]]) -> T:
        return await retry_start(name, start, repairs=self.repairs)

    async def _start_engines(self) -> SglangFleet | None:
        if not self.spec.plan.engines.num:
            return None
        builder = self.session.builder
        fleet = await builder.start_engines(self.engines, retry_start=self._retry_start)
        keep_scorer(self.engines, builder, repairs=self.repairs)
        return fleet

    async def _start_trainer(self) -> HealingTrainer:
        """Start the trainer's ranks, which are replaced if they die, with their initial weights; an
        adapter's weights are loaded in its turn."""
        trainer = self.trainer = HealingTrainer(
            await self._retry_start("trainer", self._start_ranks),
            restart=self._restart_ranks,
            repairs=self.repairs,
            silence_s=self.spec.recipe.machine.silence_s,
            free_devices=self._free_devices if self.shares_memory else None,
            copies=self._copies(),
        )
        self.probes.append(trainer.probe)
        if not self.spec.adapters:
            await self.trainings[0].begin(trainer)
        return trainer

    def _copies(self) -> Copies | None:
        """Return the object that copies the ranks' state, if the recipe wants copies. Its processes
        start in the background."""
        every = self.spec.recipe.fault.copy_every
        if not every:
            return None
        copies = Copies(
            every=every,
            start_keepers=partial(start_keepers, self.session.builder),
            start_ranks=self._start_ranks,
            keeper_of_rank=keepers_of_ranks(self.spec.plan),
            repairs=self.repairs,
            silence_s=self.spec.recipe.machine.silence_s,
        )
        copies.start()
        return copies

    def _free_devices(self) -> AbstractAsyncContextManager[None]:
        """Make room for ranks on the devices: before there is a run, its engines sleep."""
        run = self.trainings[0].run
        devices = run.devices if run is not None else None
        return devices.lend_to_ranks() if devices is not None else nullcontext()

    async def _start_ranks(self) -> RankGroup:
        """Start ranks with the given model's weights. Waits for a checkpoint whose manifest is
        being written, so that it counts."""
        for one in self.trainings:
            await one.saver.completed()
        with_teachers = all(one.work.asks_teachers for one in self.trainings)
        return await self.session.builder.start_trainer(with_teachers=with_teachers)

    async def _restart_ranks(self) -> RankGroup:
        """Start ranks with the state of this run's newest checkpoint, or with the model if there is
        none yet."""
        ranks = await self._start_ranks()
        for one in self.trainings:
            await one.load_newest(ranks)
        return ranks

    async def save_and_stop(self, stopped: Stopped) -> None:
        """Save what was learned since the newest checkpoints, then raise Stopped or NodesJoined."""
        started = [one for one in self.trainings if one.has_learned]
        for one in started:
            await one.save_last()
        await self._finish_mirrors()
        is_whole = len(started) == len(self.trainings)
        if isinstance(stopped, NodesJoined) and is_whole:
            raise stopped
        steps = ", ".join(f"{one.adapter or ''} {one.reached}".strip() for one in self.trainings)
        what = f"after {steps}, and saved" if started else "before the first step"
        why = self.stop.why + ("" if is_whole else "; nothing had been trained yet")
        raise Stopped(f"stopped {what}", why=why, fix=self._resume())


def _require_fleet(fleet: SglangFleet | None) -> SglangFleet:
    assert fleet is not None, "engines that take turns with a trainer"
    return fleet


async def _result_of(starting: asyncio.Future[T]) -> T:
    return await starting


def _failure_of(starting: asyncio.Future[SglangFleet | None]) -> Probe:
    """Return a probe that ends the run as soon as the engines fail to start."""

    async def probe() -> None:
        if starting.done() and not starting.cancelled() and (error := starting.exception()):
            raise error

    return probe


LOOK_EVERY_S = 5.0
"""Seconds between two checks; also how long a node must have been available before it is used."""


class JoiningNodes:
    """Restarts a run on more nodes. Belongs to one attempt, whose spec has a `full_recipe`."""

    def __init__(self, spec: RunSpec, *, stop: StopFlag, bus: EventBus) -> None:
        """Set up the checks. `stop`: flag of the loop; `bus` gets one notice for each node that
        cannot be used."""
        self._spec, self._stop, self._bus = spec, stop, bus
        self._known = {member.node.node_id for member in spec.nodes.chosen}
        """Nodes of the run, and nodes that were checked and not used."""
        self._seen = set[str]()
        """Nodes seen in the last look."""
        self._looked_at = time.monotonic()
        self._is_over = False

    async def probe(self) -> None:
        """Check which nodes have joined. Never raises because of what a new node is or lacks."""
        if self._is_over or time.monotonic() - self._looked_at < LOOK_EVERY_S:
            return
        present = {node.node_id for node in await in_thread(living_nodes)}
        settled, self._seen, self._looked_at = present & self._seen, present, time.monotonic()
        self._known &= present
        if not settled - self._known:
            return
        self._known |= settled
        try:
            nodes = await in_thread(lambda: self._usable(len(settled)))
        except MilesError as error:
            text = f"the cluster has other nodes, which the run does not use: {error.what}"
            self._bus.emit(Notice(text=f"{text}: {error.why}", level="warning"))
            return
        if len(nodes.chosen) > len(self._spec.nodes.chosen):
            self._is_over = True
            self._stop.set_joined(self._joined(nodes))

    def _usable(self, num_nodes: int) -> RunNodes:
        """Return that many nodes. Raises MilesError if a run could not start on them."""
        full = self._spec.full_recipe
        assert full is not None, "a run that has all its nodes looks for none"
        loaded = with_num_nodes(min(num_nodes, full.recipe.machine.nodes), full)
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
            why=f"the run has {len(own)} of its requested nodes and can now get "
            f"{len(nodes.chosen)}; it was saved and restarts with them",
            fix=f"miles resume {self._spec.run.typed}",
        )
