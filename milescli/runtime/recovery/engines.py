"""Holds the rollout side of a run: actors that host engine processes, and the clients of engines
and reward model. Started by `build`, monitored by `engine_keepers`."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from milescli.backends.ray.actor import ActorHandle, run_all, start_all
from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.backends.sglang.launch.process import ProcessLook
from milescli.backends.sglang.launch.spec import EngineSpec
from milescli.core.concurrency import in_thread
from milescli.core.errors import WorkerDied
from milescli.core.files import last_log_lines
from milescli.runtime.recovery.rank_group import RankGroup
from milescli.train.base import TrainBatch, Trainer
from milescli.train.objectives.reward_model import scored_sequence
from milescli.train.packing import pack

STOP_TIMEOUT_S = 20.0
"""Seconds for an engine to end regularly, or by SIGKILL."""
KILL_TIMEOUT_S = 8.0
"""Time for an engine to end by SIGKILL at once."""
DUMP_TIMEOUT_S = 40.0
"""Time for an actor to dump the stacks of its processes."""


@dataclass(slots=True, kw_only=True)
class EngineActors:
    """Holds one engine: an actor on each of its nodes; the first one runs the HTTP server."""

    index: int
    """Index in the plan."""
    specs: Sequence[EngineSpec]
    handles: Sequence[ActorHandle]
    groups: Sequence[int] = ()
    """[nodes] its process groups, once it has started."""

    @property
    def name(self) -> str:
        """Return the name of the engine for errors."""
        return self.specs[0].name

    @property
    def url(self) -> str:
        """Return the URL of its HTTP server."""
        return self.specs[0].url

    async def start(self, *, timeout_s: float) -> None:
        """Start its processes; do not wait until they answer."""
        await start_all(self.handles, timeout_s=timeout_s)
        await run_all(self.handles, "start", timeout_s=timeout_s)
        self.groups = await run_all(self.handles, "group", timeout_s=timeout_s)

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Wait until it answers. Raises WorkerDied or WaitTimeout."""
        await run_all(self.handles, "wait_ready", timeout_s, timeout_s=timeout_s + 10)

    async def look(self) -> ProcessLook:
        """Check its processes on all nodes, and return their state; `stopped` also if an actor does
        not answer. Raises WorkerDied if one of its processes or actors has ended."""
        pairs = zip(self.handles, self.specs, strict=True)
        looks = await asyncio.gather(*(_look(handle, spec) for handle, spec in pairs))
        stopped = next((look.stopped for look in looks if look.stopped), None)
        return ProcessLook(stopped=stopped, cpu_s=sum(look.cpu_s for look in looks))

    async def dump_stacks(self) -> list[str]:
        """Write the stacks of its processes beside their logs; return the files. Processes whose
        actor does not answer are left out."""
        speaks = await asyncio.gather(*(handle.look() for handle in self.handles))
        dumps = [
            handle.run("dump_stacks", timeout_s=DUMP_TIMEOUT_S)
            for handle, state in zip(self.handles, speaks, strict=True)
            if state is not None
        ]
        files = await asyncio.gather(*dumps, return_exceptions=True)
        return [file for file in files if isinstance(file, str)]

    async def stop(self, *, grace_s: float = 10.0) -> None:
        """End its processes, after `grace_s` by SIGKILL. Processes without an actor are left to the
        watchdog, or to its replacement."""
        with contextlib.suppress(Exception):  # a dead one cannot be stopped
            timeout_s = STOP_TIMEOUT_S if grace_s else KILL_TIMEOUT_S
            await run_all(self.handles, "stop", grace_s, timeout_s=timeout_s)


class Keeper(Protocol):
    """Starts an engine in the place of a dead one; see `engine_keepers`."""

    async def probe(self) -> None:
        """Check the engines. Raises WorkerDied if one cannot be replaced any more."""
        ...

    async def close(self) -> None:
        """Stop replacing engines."""
        ...


@dataclass(slots=True, kw_only=True)
class Engines:
    """Manages all engines of a run, with their clients."""

    actors: dict[int, EngineActors] = field(default_factory=dict)
    """Actors by their place in the plan."""
    fleet: SglangFleet | None = None
    evaluation: SglangFleet | None = None
    """Engines reserved for evaluations; None: the plan reserves none."""
    policies: dict[str, SglangFleet] = field(default_factory=dict)
    """Engines that serve `rollout.policies`, by their name there."""
    adapters: dict[str, SglangFleet] = field(default_factory=dict)
    """Engines as each of several adapters uses them: the same ones."""
    scorer: RankGroup | None = None
    """Holds the reward model, if the recipe uses one; after `keep_scorer` it is replaced if it
    dies."""
    scores: ScoreClient | None = None
    scorer_keeper: Keeper | None = None
    on_scorer: list[Callable[[ActorHandle], None]] = field(default_factory=list)
    """Called with the process that replaces a dead reward model's."""
    keepers: list[Keeper] = field(default_factory=list)
    """Keepers of each fleet; without one, the death of an engine is an error."""

    @property
    def heads(self) -> list[EngineSpec]:
        """Return the spec of each engine's first node, which answers requests, in the plan's
        order."""
        return [self.actors[index].specs[0] for index in sorted(self.actors)]

    @property
    def num_answers(self) -> int:
        """Return the number of responses that the policy's engines, and those of roles, have
        completed."""
        fleets = filter(None, (self.fleet, *self.policies.values()))
        return sum(fleet.num_answers for fleet in fleets)

    async def probe(self) -> None:
        """Check the engines and the reward model. Raises WorkerDied if one is dead and is not
        replaced."""
        if self.keepers:
            await asyncio.gather(*(keeper.probe() for keeper in self.keepers))
        else:
            await asyncio.gather(*(engine.look() for engine in self.actors.values()))
        if self.scorer_keeper is not None:
            await self.scorer_keeper.probe()

    async def leave(self) -> None:
        """Stop replacing dead processes."""
        keepers = filter(None, (*self.keepers, self.scorer_keeper))
        await asyncio.gather(*(keeper.close() for keeper in keepers))

    async def stop(self) -> None:
        """End clients and engines."""
        await self.leave()
        others = (*self.policies.values(), *self.adapters.values())
        for fleet in filter(None, (self.fleet, self.evaluation, *others)):
            await fleet.close()
        await asyncio.gather(*(engine.stop() for engine in self.actors.values()))


async def _look(handle: ActorHandle, spec: EngineSpec) -> ProcessLook:
    """Check one engine process through its actor, and return its state."""
    look: ProcessLook | None = await handle.look("look")
    if look is None:
        return ProcessLook(stopped=f"the actor of {spec.name} does not respond")
    if look.ended is not None:
        raise WorkerDied(
            f"{spec.name} died",
            why=f"{look.ended}; last lines of its log:\n{last_log_lines(spec.log_path)}",
            fix=f"less {shlex.quote(str(spec.log_path))}",
        )
    return look


CALL_TOKENS = 16384
"""Approximate number of tokens sent at a time; more wait."""
_Waiting = tuple[Sequence[int], asyncio.Future[float]]


class ScoreClient:
    """Sends requests to a reward model: requests that arrive while it computes form its next batch.
    Implements milescli.rollout.rewards.served.reward_model.ScoreServer. Belongs to one event
    loop."""

    def __init__(self, ranks: Trainer) -> None:
        """Set the ranks of the reward model."""
        self._ranks = ranks
        self._waiting: list[_Waiting] = []
        self._work: asyncio.Task[None] | None = None

    async def score(self, token_ids: Sequence[int]) -> float:
        """Return the reward model's score of a sequence. Raises what the call of the ranks
        raises."""
        reply: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((token_ids, reply))
        if self._work is None or self._work.done():
            self._work = asyncio.ensure_future(self._serve())
        return await reply

    async def _serve(self) -> None:
        while self._waiting:
            batch = self._taken()
            try:
                scores = await self._scores([token_ids for token_ids, _ in batch])
            except Exception as error:  # told to all who wait for it
                for _, reply in batch:
                    if not reply.done():
                        reply.set_exception(error)
                continue
            for (_, reply), score in zip(batch, scores, strict=True):
                if not reply.done():
                    reply.set_result(score)

    def _taken(self) -> list[_Waiting]:
        """Return the oldest requests, up to the bound; at least one."""
        tokens = count = 0
        while count < len(self._waiting) and (not count or tokens < CALL_TOKENS):
            tokens += len(self._waiting[count][0])
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    async def _scores(self, lines: Sequence[Sequence[int]]) -> list[float]:
        batch = await in_thread(lambda: self._packed(lines))
        return [float(values[-1]) for values in await self._ranks.score(batch)]

    def _packed(self, lines: Sequence[Sequence[int]]) -> TrainBatch:
        return pack(
            [scored_sequence(line, group=n) for n, line in enumerate(lines)],
            objective="reward_model",
            dp=1,
            max_tokens_per_microbatch=1,  # each alone: who asked beside it must not change a bit
        )
