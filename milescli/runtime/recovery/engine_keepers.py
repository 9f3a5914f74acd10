"""Watches the engines of a run, and replaces those that die, while the rest continue. No sample is
lost, and none enters a batch twice: the requests of the dead engine are sent again, with the same
seeds.

`EngineWatch` says whether one engine lives and answers while requests wait for it. An engine that
computes but does not answer may be slow: it gets the time that its work takes on the slowest
hardware. The keepers act on that."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import Protocol

from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.backends.sglang.client.http import EngineDied
from milescli.core.errors import MilesError, NodeDied, WaitTimeout, WorkerDied
from milescli.core.events import Event, Notice, WorkerLost, WorkerReplaced, WorkerSilent
from milescli.core.files import last_log_lines
from milescli.core.run_processes import CpuClock
from milescli.core.silence import BUSY_TIMES, Silence
from milescli.core.types import EngineAddress
from milescli.models import load_facts, table
from milescli.models.costs import token_flops
from milescli.recipe.machine import MachineSettings
from milescli.runtime.build import SCORER_NAME, Builder
from milescli.runtime.recovery.engines import EngineActors, Engines, ScoreClient
from milescli.runtime.recovery.healing_trainer import HealingTrainer
from milescli.runtime.recovery.rank_group import RankGroup
from milescli.runtime.recovery.restarts import Repairs, with_refusal

HEALTH_CHECK_AFTER_S = 5.0
"""Seconds without a reply, while requests wait, after which miles checks the engine's health. If
that takes equally long, the engine counts as silent."""
PASS_TOKENS = 16_384
"""Largest number of new tokens that an engine processes in one pass; it answers between passes."""
SLOWEST_FLOPS = {"cpu": 1e9, "cuda": 1e13, "rocm": 1e13}
"""Operations per second of a core or a device, far below the usual: a core of a busy machine was
measured at 2e10."""


class WatchedFleet(Protocol):
    """Defines the client of the engines, as the keepers use it; see SglangFleet."""

    on_death: Callable[[EngineDied], None] | None

    @property
    def engines(self) -> Sequence[EngineAddress]:
        """Return the engines that the fleet uses."""
        ...

    def remove(self, error: EngineDied) -> None:
        """Stop sending requests to this engine."""

    def num_waiting(self, url: str) -> int:
        """Return the number of open requests to the engine at this URL."""
        ...

    def silent_s(self, url: str) -> float:
        """Return the seconds since the engine last sent anything."""
        ...

    async def answers(self, url: str) -> bool:
        """Return True if the engine answers."""
        ...


class EngineWatch:
    """Watches one engine, from its start to its death. Belongs to one event loop."""

    def __init__(
        self, engine: EngineActors, *, fleet: WatchedFleet, settings: MachineSettings
    ) -> None:
        """Start to watch. `fleet`: the client that sends requests to the engine."""
        self.engine, self._fleet = engine, fleet
        self.silence = Silence(worker=engine.name, bound_s=settings.silence_s)
        self._patience_s = settings.start_timeout_s
        """Until it has replied once: it may compile what it needs first."""
        self._clock = CpuClock()
        self._unheard_since: float | None = None
        self._waited_since: float | None = None
        self._has_replied = False
        self._question: asyncio.Task[bool] | None = None
        self._asked_at = 0.0
        self._is_unwell = False
        """By the last reply to a question, or by none."""

    async def look(self) -> None:
        """Check the engine once. Raises WorkerDied if it has ended."""
        look = await self.engine.look()
        is_busy = look.stopped is None and self._clock.is_busy(look.cpu_s)
        unheard = self._silence_reason()
        if look.stopped is not None:
            waiting = self._fleet.num_waiting(self.engine.url)
            self.silence.observe(f"{look.stopped}, and {waiting} requests are waiting for it")
        else:
            self.silence.observe(self._unexplained(unheard, is_busy=is_busy), times=BUSY_TIMES)

    def close(self) -> None:
        """Stop the checks."""
        if self._question is not None:
            self._question.cancel()

    def _unexplained(self, unheard: str | None, *, is_busy: bool) -> str | None:
        """Return `unheard`, or None if the engine may still be working: on a CPU its load shows
        that, on a device nothing does."""
        if unheard is None:
            self._unheard_since = None
            return None
        self._unheard_since = self._unheard_since or time.monotonic()
        may_work = is_busy or self.engine.specs[0].device_kind != "cpu"
        is_at_work = may_work and time.monotonic() < self._unheard_since + self._work_s()
        return None if is_at_work else unheard

    def _work_s(self) -> float:
        """Return the largest time in seconds of one pass over its requests."""
        spec, waiting = self.engine.specs[0], self._fleet.num_waiting(self.engine.url)
        tokens = min(waiting * spec.context_length, PASS_TOKENS)
        each = spec.cpu_threads if spec.device_kind == "cpu" else 1
        return tokens * self._token_flops / (SLOWEST_FLOPS[spec.device_kind] * each * spec.tp)

    @cached_property
    def _token_flops(self) -> float:
        spec = self.engine.specs[0]
        return token_flops(table(load_facts(spec.model_dir))).forward_mean(spec.context_length)

    def _silence_reason(self) -> str | None:
        """Return the reason if requests wait and the engine does not answer; else None."""
        url, now = self.engine.url, time.monotonic()
        waiting = self._fleet.num_waiting(url)
        if not waiting:
            self._waited_since, self._is_unwell = None, False
            return None
        if self._waited_since is None:
            self._waited_since = now
        if self._fleet.silent_s(url) < min(HEALTH_CHECK_AFTER_S, now - self._waited_since):
            self._has_replied, self._is_unwell = True, False
            return None
        self._check_health(url, now)
        if not self._is_unwell:
            return None
        if not self._has_replied and now - self._waited_since < self._patience_s:
            return None
        return f"it does not respond, and {waiting} requests are waiting for it"

    def _check_health(self, url: str, now: float) -> None:
        question = self._question
        if question is None:
            self._asked_at = now
            self._question = asyncio.ensure_future(self._fleet.answers(url))
        elif not question.done():
            self._is_unwell |= now - self._asked_at > HEALTH_CHECK_AFTER_S
        else:
            self._question = None
            self._is_unwell = bool(question.exception()) or not question.result()
            self._has_replied |= not self._is_unwell

    async def death(self) -> WorkerDied:
        """Return the error for an engine that hangs, after dumping its stacks."""
        spec, silence = self.engine.specs[0], self.silence
        stacks = await self.engine.dump_stacks()
        where = "".join(f"\nits stacks: {file}" for file in stacks)
        return WorkerDied(
            f"{self.engine.name} has been silent for {silence.seconds:.0f} s",
            why=f"{silence.reason}{where}\nlast lines of its log:\n{last_log_lines(spec.log_path)}",
            fix=[
                f"less {shlex.quote(str(spec.log_path))}",
                f"--set machine.silence_s={4 * silence.bound_s:.0f}",
            ],
        )


Start = Callable[[], Awaitable[EngineAddress]]
"""Starts an engine."""
Join = Callable[[Start], Awaitable[None]]
"""Starts an engine, sends it the weights of the others, and lets it answer: `Devices.replace`."""


class EngineKeeper:
    """Keeps the engines of one fleet alive. Belongs to one event loop."""

    def __init__(
        self,
        fleet: WatchedFleet,
        *,
        indices: range,
        engines: Engines,
        builder: Builder,
        repairs: Repairs,
        join: Join,
    ) -> None:
        """Watch the engines of a fleet. `indices`: their indices in the plan."""
        self._fleet, self._indices, self._engines = fleet, indices, engines
        self._builder, self._repairs, self._join = builder, repairs, join
        self._healing: dict[int, asyncio.Task[None]] = {}
        self._watches: dict[int, EngineWatch] = {}
        self._failure: Exception | None = None
        self._is_closed = False
        self.on_empty: Callable[[], None] | None = None
        """Called where no engine is left for the moment."""
        fleet.on_death = self._on_death

    async def probe(self) -> None:
        """Check the engines, and start to replace those that are dead or hang. Raises WorkerDied if
        one is not replaced because a limit is reached."""
        running = [self._engines.actors[i] for i in self._indices if i not in self._healing]
        if self._failure is None and not self._is_closed:
            await asyncio.gather(*(self._look(engine) for engine in running))
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Stop replacing engines."""
        self._fleet.on_death, self._is_closed = None, True
        for watch in self._watches.values():
            watch.close()
        tasks = list(self._healing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, engine: EngineActors) -> None:
        watch = self._watches.get(engine.index)
        if watch is None or watch.engine is not engine:
            if watch is not None:
                watch.close()
            settings = self._builder.recipe.machine
            watch = EngineWatch(engine, fleet=self._fleet, settings=settings)
            self._watches[engine.index] = watch
        try:
            await watch.look()
        except WorkerDied as error:
            self._on_loss(engine, error)
            return
        if news := watch.silence.warning(self._repairs.step()):
            self._repairs.bus.emit(news)
        if watch.silence.is_too_long:
            self._on_loss(engine, await watch.death())

    def _on_death(self, error: EngineDied) -> None:
        """Handle the fleet's report that an engine does not answer."""
        for index in self._indices:
            engine = self._engines.actors[index]
            if engine.url == error.url:
                self._on_loss(engine, error)

    def _on_loss(self, engine: EngineActors, error: WorkerDied) -> None:
        is_replaced = self._engines.actors[engine.index] is not engine
        if engine.index in self._healing or is_replaced or self._failure is not None:
            return
        dead = EngineDied(error.what, why=error.why, fix=error.fixes)
        dead.url = engine.url
        self._fleet.remove(dead)
        if self._may_start(engine, error):
            healing = asyncio.ensure_future(self._start_replacements(engine))
            self._healing[engine.index] = healing
        if self.on_empty is not None and not self._fleet.engines:
            self.on_empty()

    def _may_start(self, engine: EngineActors, error: MilesError) -> bool:
        """Return True if a replacement may start; otherwise the run ends with this error. Nothing
        is started on a node that is gone."""
        if isinstance(error, NodeDied):
            self._failure = error
            return False
        if refusal := self._repairs.begin(engine.name, error):
            self._failure = with_refusal(error, refusal)
            return False
        return True

    async def _start_replacements(self, engine: EngineActors) -> None:
        """Start replacements until one runs, or a limit is reached."""
        began = time.monotonic()
        try:
            while True:
                dead = self._engines.actors[engine.index]
                await self._builder.end_engine(dead)
                try:
                    await self._join(lambda d=dead: self._builder.restart_engine(d, self._engines))
                except (WorkerDied, WaitTimeout) as error:
                    if not self._may_start(engine, error):
                        return
                else:
                    break
        except Exception as error:  # other weights than it was sent, or a fault of ours: told by
            self._failure = error  # `probe`
            return
        finally:
            del self._healing[engine.index]
        self._repairs.done(engine.name, began=began)


def warn_of_losses(
    warn: Callable[[str], None], note: Callable[[str], None] | None = None
) -> Callable[[Event], None]:
    """Return a listener that warns the user of processes that hang or are lost, and reports with
    `note` those that were replaced."""

    def listen(event: Event) -> None:
        if isinstance(event, WorkerSilent):
            warn(f"{event.worker} has been silent for {event.seconds:.0f} s: {event.why}")
        elif isinstance(event, WorkerLost):
            warn(f"{event.what}; miles starts another one")
        elif isinstance(event, Notice) and event.level == "warning":
            warn(event.text)
        elif isinstance(event, WorkerReplaced | Notice) and note is not None:
            note(event.text if isinstance(event, Notice) else event.sentence)

    return listen


def keep_engines(
    fleet: WatchedFleet,
    name: str,
    engines: Engines,
    builder: Builder,
    *,
    repairs: Repairs,
    join: Join,
) -> EngineKeeper:
    """Replace dead engines of the fleet with this name from now on."""
    indices = builder.indices_of(name)
    keeper = EngineKeeper(
        fleet, indices=indices, engines=engines, builder=builder, repairs=repairs, join=join
    )
    engines.keepers.append(keeper)
    return keeper


def keep_frozen(
    fleet: SglangFleet, name: str, engines: Engines, builder: Builder, *, repairs: Repairs
) -> None:
    """Replace dead engines of a fleet that gets no weights from a trainer: a new one loads the same
    weights as the others."""

    async def join(start: Start) -> None:
        await fleet.admit(await start(), fleet.version)

    keep_engines(fleet, name, engines, builder, repairs=repairs, join=join)


def keep_scorer(engines: Engines, builder: Builder, *, repairs: Repairs) -> None:
    """Replace the reward model's process if it dies, if there is one. The model does not learn, so
    a new process is equivalent, and scores again what the dead one had not finished."""
    if engines.scorer is None:
        return

    async def restart() -> RankGroup:
        new = engines.scorer = await builder.start_scorer()
        for tell in engines.on_scorer:
            tell(new.ranks[0])
        return new

    ranks = HealingTrainer(
        engines.scorer,
        restart=restart,
        repairs=repairs,
        silence_s=builder.recipe.machine.silence_s,
        name=SCORER_NAME,
    )
    engines.scorer_keeper, engines.scores = ranks, ScoreClient(ranks)
