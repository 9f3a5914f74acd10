"""Processes for quick calls on another node of the run, as the driver sees them. Many calls to one
node's actor are sent in one message, and so are the replies. Used by the runtime, for
environments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from milescli.backends.ray.actor import ActorHandle
from milescli.backends.ray.cluster import Cluster
from milescli.backends.ray.nodes import ClusterNode, find_dead
from milescli.backends.ray.process_host import (
    POLL_S,
    PROCESS_HOST,
    CallOrder,
    CallResult,
    CloseOrder,
    OpenOrder,
    Order,
)
from milescli.core.errors import MilesError, WorkerDied
from milescli.core.imports import Origin
from milescli.workers.async_worker import QuickCall
from milescli.workers.worker import CallFailed

START_TIMEOUT_S = 60.0
"""Timeout for starting an actor that replaces one that died."""
REPLY_TIMEOUT_S = POLL_S + 30.0
"""Timeout of an actor, which only forwards calls: if it takes longer, it is ended."""
MAX_LOST = 3
"""Consecutive actors that may end without any reply before the run stops."""


class NodeProcesses:
    """Manages the processes of one node. Belongs to one event loop."""

    def __init__(
        self, cluster: Cluster, *, number: int, tell: Callable[[str], None], name: str
    ) -> None:
        """Prepare the processes. `number`: of the node in the plan; `tell`: receives a message if
        an actor dies; `name`: what runs in the processes, for messages and the log:
        `environments`."""
        self.node: ClusterNode = cluster.nodes[number]
        self.num_lost = 0
        """Actors in a row that ended without one reply."""
        self._cluster, self._number, self._tell = cluster, number, tell
        self._name = f"{name} on node {number}"
        self._numbers = count()
        self._actor: _Actor | None = None

    async def start(self, *, timeout_s: float) -> int:
        """Start the actor; return the node's number of cores. Raises WorkerDied or WaitTimeout."""
        handle = await self._spawned(timeout_s)
        self._actor = _Actor(self, handle)
        return await handle.run("num_cores", timeout_s=timeout_s)

    def process(self, target: str, *, memory_bytes: int, memory_key: str) -> NodeProcess:
        """Return a process, which starts with its first call, as NewCallProcess describes."""
        opened = OpenOrder(
            process=next(self._numbers),
            target=target,
            memory_bytes=memory_bytes,
            memory_key=memory_key,
        )
        return NodeProcess(self, opened)

    def close(self) -> None:
        """Stop waiting for replies; the actor itself ends with the run."""
        if self._actor is not None:
            self._actor.forget()
            self._actor = None

    async def actor(self) -> _Actor:
        """Return the node's actor; start one if there is none. Raises CallFailed if it does not
        start, WorkerDied if none ever does."""
        if self._actor is None:
            self._actor = _Actor(self, None)
        actor = self._actor
        await actor.is_ready()
        return actor

    async def spawned(self) -> ActorHandle:
        """Start a further actor."""
        return await self._spawned(START_TIMEOUT_S)

    async def lost(self, actor: _Actor, cause: Exception) -> Exception:
        """Kill a failed actor, and return the error that its calls raise."""
        self._actor = None if actor is self._actor else self._actor
        if actor.handle is not None:
            await self._cluster.kill([actor.handle])
        if await asyncio.to_thread(find_dead, [self.node]):
            return cause  # which names it, or the run's watch does
        self.num_lost += 1
        why = cause.why if isinstance(cause, MilesError) else f"{type(cause).__name__}: {cause}"
        if self.num_lost >= MAX_LOST:
            return WorkerDied(
                f"the {self._name} ended {self.num_lost} times in a row",
                why=why,
                fix=f"less {self._cluster.log_dir / self._log_name}",
            )
        self._tell(f"the {self._name} ended, and miles restarts them: {why}")
        return CallFailed(f"the {self._name} ended: {why}")

    @property
    def _log_name(self) -> str:
        return f"{self._name.replace(' ', '-')}.log"

    async def _spawned(self, timeout_s: float) -> ActorHandle:
        handle = await self._cluster.spawn(
            self._name,
            PROCESS_HOST,
            node=self._number,
            num_cpus=0.0,
            kwargs={"origin": Origin.here()},
            environment={},
        )
        try:
            await handle.start(timeout_s=timeout_s)
        except BaseException:
            await self._cluster.kill([handle])
            raise
        return handle


@dataclass(eq=False)
class _Actor:
    """Represents one actor until it ends."""

    owner: NodeProcesses
    handle: ActorHandle | None
    """None: it has not started yet."""
    failure: Exception | None = None
    """Why the actor ended; None while it lives."""
    _orders: list[Order] = field(default_factory=list)
    _waiting: dict[int, tuple[NodeProcess, QuickCall]] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=count)
    _starting: asyncio.Task[None] | None = None
    _sending: asyncio.Task[None] | None = None
    _reading: asyncio.Task[None] | None = None

    async def is_ready(self) -> None:
        """Wait until the actor has started. Raises CallFailed or WorkerDied if it has ended."""
        if self.handle is None and self.failure is None:
            if self._starting is None:
                self._starting = asyncio.ensure_future(self._start())
            await asyncio.shield(self._starting)
        if self.failure is not None:
            raise self.failure

    def order(self, order: Order) -> None:
        """Send an order after earlier ones, in one message with those of the same loop round."""
        self._orders.append(order)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send())

    def call(self, calls: NodeProcess, process: int, args: tuple[Any, ...]) -> QuickCall:
        """Send a call; return a future that its reply settles."""
        number, call = next(self._numbers), QuickCall()
        self._waiting[number] = calls, call
        self.order(CallOrder(process, number, args))
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._read())
        return call

    def drop(self, calls: NodeProcess) -> None:
        """Fail the open calls of one process, because the process was ended."""
        numbers = [number for number, (owner, _) in self._waiting.items() if owner is calls]
        for number in numbers:
            _, call = self._waiting.pop(number)
            call.settle(None, CallFailed("its process was ended"))

    def forget(self) -> None:
        """Stop waiting for the actor's replies."""
        self.failure = self.failure or CallFailed("the run has ended")
        for task in (self._starting, self._sending, self._reading):
            if task is not None:
                task.cancel()

    async def _start(self) -> None:
        try:
            self.handle = await self.owner.spawned()
        except Exception as error:
            await self._lose(error)

    async def _send(self) -> None:
        assert self.handle is not None, "ordered before it is ready"
        try:
            while self._orders and self.failure is None:
                orders, self._orders = self._orders, []
                await self.handle.run("take", orders, timeout_s=REPLY_TIMEOUT_S)
        except Exception as error:  # whatever it is, calls were lost
            await self._lose(error)

    async def _read(self) -> None:
        assert self.handle is not None, "called before it is ready"
        try:
            while self._waiting and self.failure is None:
                self._settle(await self.handle.run("replies", timeout_s=REPLY_TIMEOUT_S))
        except Exception as error:  # as above
            await self._lose(error)

    def _settle(self, settled: list[CallResult]) -> None:
        for reply in settled:
            self.owner.num_lost = 0
            calls, call = self._waiting.pop(reply.call, (None, None))
            if calls is None or call is None:
                continue  # of a process that was closed meanwhile
            calls.lives = calls.lives and reply.process_lives
            call.settle(reply.value, reply.error)

    async def _lose(self, error: Exception) -> None:
        if self.failure is not None:
            return
        self.failure = CallFailed("it has ended")  # until it is known why
        self.failure = await self.owner.lost(self, error)
        waiting, self._waiting = self._waiting, {}
        for calls, call in waiting.values():
            calls.lives = False
            call.settle(None, self.failure)


class NodeProcess:
    """Represents one process on another node, started with its first call. Implements
    CallProcess."""

    pid = None

    def __init__(self, owner: NodeProcesses, opened: OpenOrder) -> None:
        self.lives = True
        self._owner, self._opened = owner, opened
        self._actor: _Actor | None = None

    async def begin(self, *args: Any) -> QuickCall:
        """Send a call without waiting for its reply."""
        if self._actor is None and self.lives:
            try:
                actor = await self._owner.actor()
            except (CallFailed, MilesError):
                self.lives = False
                raise
            if self._actor is None and self.lives:  # no other call was first, nor was it closed
                self._actor = actor
                actor.order(self._opened)
        if self._actor is None or not self.lives:
            raise CallFailed("its process has ended")
        if self._actor.failure is not None:
            self.lives = False
            raise self._actor.failure
        return self._actor.call(self, self._opened.process, args)

    def close(self) -> None:
        """End the process. Idempotent."""
        actor, self._actor, self.lives = self._actor, None, False
        if actor is not None and actor.failure is None:
            actor.drop(self)
            actor.order(CloseOrder(self._opened.process))
