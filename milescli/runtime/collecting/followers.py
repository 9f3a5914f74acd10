"""Keeps collecting processes in step with the driver: `FleetFollower` applies to their requests
what the driver's clients do to their own, and `FollowedScorer` calls the process of the reward
model, which may be replaced."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Sequence
from typing import Any

from milescli.backends.ray.actor import ActorHandle
from milescli.backends.ray.cluster import Cluster
from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.core.errors import WaitTimeout, WorkerDied
from milescli.core.events import PublishStats
from milescli.core.types import EngineAddress, WeightVersion
from milescli.plan.types import TrainerLayout
from milescli.recipe.machine import MachineSettings
from milescli.runtime.collecting.workers import Worker, Workers
from milescli.runtime.recovery.rank_group import RankGroup
from milescli.train.base import Trainer


class FleetFollower:
    """Implements Followers of one fleet: forwards each call to the collecting processes."""

    def __init__(self, workers: Workers, fleet: SglangFleet, *, policy: str | None = None) -> None:
        """Set the fleet. `policy`: the one of `rollout.policies` that the engines serve; None: the
        trained policy."""
        self._workers, self._fleet, self._policy = workers, fleet, policy

    def begin(self) -> None:
        """Start following. Engines may have been replaced while the processes started."""
        self._fleet.followers = self
        self.use(self._fleet.engines)

    def end(self) -> None:
        """Stop following."""
        if self._fleet.followers is self:
            self._fleet.followers = None

    def engines_of(self, worker: Worker) -> list[EngineAddress]:
        """Return a process's share of the engines, chosen by their numbers, or all of them if none
        of its share lives, or if the engines play a role."""
        engines, count = list(self._fleet.engines), len(self._workers)
        if self._policy is not None:
            return engines
        own = [one for one in engines if int(one.name.split()[-1]) % count == worker.number]
        return own or engines

    async def catch_up(self, worker: Worker) -> None:
        """Bring a process to the fleet's current state: the fleet may have paused, or continued
        with new weights, while the process was starting."""
        fleet, done, closed = self._fleet, None, frozenset[str]()
        while done != (now := (fleet.is_paused, fleet.version, fleet.closed)):
            if fleet.is_paused:
                await self._workers.call(worker, "pause")
            else:
                await self._workers.call(worker, "reopen", fleet.version)
            if opened := closed - now[2]:
                await self._workers.call(worker, "reopen_some", opened)
            if now[2]:
                await self._workers.call(worker, "pause_some", now[2])
            done, closed = now, now[2]

    async def pause(self) -> PublishStats:
        return _sum(await self._workers.call_all("pause"))

    async def pause_some(self, urls: Collection[str]) -> PublishStats:
        return _sum(await self._workers.call_all("pause_some", frozenset(urls)))

    async def reopen_some(self, urls: Collection[str]) -> None:
        await self._workers.call_all("reopen_some", frozenset(urls))

    async def reopen(self, version: WeightVersion) -> None:
        await self._workers.call_all("reopen", version)

    def use(self, engines: Sequence[EngineAddress]) -> None:
        for worker in self._workers:
            self._workers.send(worker, "use", self.engines_of(worker), self._policy)

    def num_waiting(self, url: str) -> int:
        known = (worker.engines.get(url) for worker in self._workers)
        return sum(one[0] for one in known if one is not None)

    def silent_s(self, url: str) -> float:
        known = (worker.engines.get(url) for worker in self._workers)
        last = max((one[1] for one in known if one is not None), default=-math.inf)
        return time.monotonic() - last


def _sum(stats: Sequence[PublishStats]) -> PublishStats:
    return PublishStats(
        num_running=sum(one.num_running for one in stats),
        discarded_tokens=sum(one.discarded_tokens for one in stats),
        retractions=sum(one.retractions for one in stats),
        held_requests=sum(one.held_requests for one in stats),
    )


class FollowedScorer(Trainer):
    """Calls the reward model's process from a collecting process. If it dies, the driver starts
    another and passes it to `follow`. Belongs to one event loop."""

    def __init__(self, cluster: Cluster, settings: MachineSettings) -> None:
        """Set the run's cluster and time limits."""
        self._cluster, self._settings = cluster, settings
        self._ranks: RankGroup | None = None
        self._named = asyncio.Event()

    def follow(self, process: ActorHandle) -> None:
        """Call this process from now on."""
        self._ranks = RankGroup(
            cluster=self._cluster,
            ranks=[process],
            pids=[],
            layout=TrainerLayout(),
            step_timeout_s=self._settings.request_timeout_s,
        )
        self._named.set()

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        while True:
            await self._wait()
            ranks = self._ranks
            assert ranks is not None
            try:
                return await ranks.call(method, *args, **kwargs)
            except WorkerDied:
                if self._ranks is ranks:
                    self._named.clear()

    async def _wait(self) -> None:
        bound_s = 2 * self._settings.start_timeout_s
        try:
            async with asyncio.timeout(bound_s):
                await self._named.wait()
        except TimeoutError:
            raise WaitTimeout(
                "timed out waiting for another process with the reward model",
                why=f"it died, and no other was named within {bound_s:.0f} s",
                fix="read its log, reward-model.log",
            ) from None
