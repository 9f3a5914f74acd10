"""Keeps copies of the trainer's state in the memory of other processes: takes one every few steps,
sends it while training continues, and loads it into new ranks. The copies of a rank are in a
process (`copy_keeper`) on the next node of the plan, or on the same node if there is only one.
`healing_trainer` calls this, and repeats the calls since a copy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from milescli.backends.ray.actor import ActorHandle, gather_all, move, start_all
from milescli.core.errors import NodeDied, WaitTimeout, WorkerDied
from milescli.core.events import Notice
from milescli.plan.types import Plan, TrainerLayout
from milescli.runtime.build import Builder, trainer_slots
from milescli.runtime.recovery.rank_group import DEATH_GRACE_S, RankGroup, RankWatch
from milescli.runtime.recovery.restarts import Repairs

NAME = "copy keeper"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """Describes a complete copy: the keepers have all bytes of every rank."""

    number: int
    """Counted from 1."""
    mark: int
    """How many calls had changed the ranks: see `healing_trainer.RecordedCalls`."""
    sizes: Sequence[list[int]]
    """[ranks][sections] bytes."""


class Copies:
    """Keeps copies of the ranks' state: at most one is complete, and at most one is being sent. A
    complete copy serves until the next one is complete."""

    def __init__(
        self,
        *,
        every: int,
        start_keepers: Callable[[], Awaitable[RankGroup]],
        start_ranks: Callable[[], Awaitable[RankGroup]],
        keeper_of_rank: Sequence[int],
        repairs: Repairs,
        silence_s: float,
    ) -> None:
        """Set up copies. `every`: steps between copies; `start_ranks` starts new ranks with any
        weights; `keeper_of_rank`: [ranks] which keeper holds the copies of each."""
        self._every, self._keeper_of_rank = every, keeper_of_rank
        self._start_keepers, self.start_ranks = start_keepers, start_ranks
        self._repairs = repairs
        self._watch = RankWatch(NAME, silence_s, bus=repairs.bus, step=repairs.step)
        self._keepers: RankGroup | None = None
        self._starting: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._copy: _Copy | None = None
        self._num_steps = 0
        """Steps since the last copy was taken."""
        self._num_taken = 0

    def start(self) -> None:
        """Start the keepers in the background; no copy is taken until they run."""
        self._starting = asyncio.ensure_future(self._start(began=None))

    async def _start(self, *, began: float | None) -> None:
        """Start keepers. `began`: when the loss of those that they replace was noticed; None: the
        first."""
        self._keepers = await self._start_keepers()
        if began is not None:
            self._repairs.done(NAME, began=began)

    @property
    def mark(self) -> int | None:
        """Return the mark of the complete copy; None if there is none."""
        return self._copy.mark if self._copy is not None else None

    def count_step(self) -> None:
        """Count a step that the ranks took."""
        self._num_steps += 1

    async def take(self, ranks: RankGroup, mark: int) -> None:
        """Copy the state of idle ranks if a copy is due and the last one has arrived. Return when
        the ranks may change their state. Raises WorkerDied or WaitTimeout of a rank."""
        is_sent = self._sending is None or self._sending.done()
        if self._keepers is None or self._num_steps < self._every or not is_sent:
            return
        sizes = await ranks.call("take_copy")
        if self._keepers is None:  # lost meanwhile; the next step's copy is for new ones
            return
        self._num_steps, self._num_taken = 0, self._num_taken + 1
        copy = _Copy(number=self._num_taken, mark=mark, sizes=sizes)
        self._sending = asyncio.ensure_future(self._send(self._keepers, ranks, copy))

    async def _send(self, keepers: RankGroup, ranks: RankGroup, copy: _Copy) -> None:
        """Send a copy to the keepers. If a process dies meanwhile, the previous copy stays valid,
        and the probe of that process reports the death."""
        counts = self._copy.number if self._copy is not None else 0

        async def part(rank: int) -> None:
            keeper, sizes = keepers.ranks[self._keeper_of_rank[rank]], copy.sizes[rank]
            timeout_s = keepers.step_timeout_s
            await keeper.run("begin", copy.number, rank, sizes, keep=counts, timeout_s=timeout_s)
            for section, size in enumerate(sizes):
                await move(
                    size,
                    source=ranks.ranks[rank],
                    read=("read_copy", section),
                    sink=keeper,
                    write=("write", copy.number, rank, section),
                    timeout_s=timeout_s,
                )

        try:
            parts = map(part, range(len(ranks.ranks)))
            await gather_all([asyncio.ensure_future(sent) for sent in parts])
            self._copy = copy
        except (WorkerDied, WaitTimeout) as error:
            if await ranks.find_dead() or await keepers.find_dead():
                self._num_steps = self._every  # the next step's is another try
                return
            text = f"no copy of the trainer's state was made: {error.what}, {error.why}"
            self._repairs.bus.emit(Notice(text=text, level="warning"))

    async def restore(self, ranks: RankGroup) -> bool:
        """Load the complete copy into new ranks. Return False if it is lost. Raises WorkerDied or
        WaitTimeout of a rank."""
        await self._stop_sending()
        copy, keepers = self._copy, self._keepers
        if copy is None or keepers is None:
            return False
        try:
            await ranks.call("expect_copy", copy.sizes)
            parts = [self._give(keepers, *pair, copy) for pair in enumerate(ranks.ranks)]
            await gather_all([asyncio.ensure_future(given) for given in parts])
            await ranks.call("take_over")
        except (WorkerDied, WaitTimeout):
            if await keepers.find_dead(within_s=DEATH_GRACE_S) is None:
                raise
            self._copy = None
            return False
        return True

    async def _give(self, keepers: RankGroup, number: int, rank: ActorHandle, copy: _Copy) -> None:
        """Send one rank its part. `number`: the rank's."""
        for section, size in enumerate(copy.sizes[number]):
            await move(
                size,
                source=keepers.ranks[self._keeper_of_rank[number]],
                read=("read", copy.number, number, section),
                sink=rank,
                write=("write_copy", section),
                timeout_s=keepers.step_timeout_s,
            )

    async def probe(self) -> None:
        """Check the keepers; if one is lost, start all again, without copies. Raises NodeDied, and
        errors of the background tasks."""
        if self._sending is not None and self._sending.done():
            sending, self._sending = self._sending, None
            sending.result()
        if self._starting is not None and self._starting.done():
            starting, self._starting = self._starting, None
            if error := starting.exception():
                await self._replace(error)
        keepers = self._keepers
        if keepers is None:
            return
        error = await self._watch.loss(keepers)
        if error is not None and keepers is self._keepers:
            await self._replace(error)

    async def _replace(self, error: BaseException) -> None:
        """Start new keepers; if the limits of restarts are reached, take no more copies."""
        if isinstance(error, NodeDied) or not isinstance(error, WorkerDied | WaitTimeout):
            raise error
        keepers, self._keepers = self._keepers, None
        await self._stop_sending()
        self._copy = None
        if keepers is not None:
            await keepers.kill()
        if refusal := self._repairs.begin(NAME, error):
            text = f"{error.what}; no further copies are made: {refusal}"
            self._repairs.bus.emit(Notice(text=text, level="warning"))
            return
        self._num_steps = self._every
        self._starting = asyncio.ensure_future(self._start(began=time.monotonic()))

    async def _stop_sending(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def close(self) -> None:
        """Stop taking copies."""
        tasks = [task for task in (self._starting, self._sending) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


KEEPER_TARGET = "milescli.runtime.recovery.copy_keeper:CopyKeeper"


def keepers_of_ranks(plan: Plan) -> list[int]:
    """Return [ranks] the number of the keeper that holds each rank's copies."""
    nodes = _keeper_nodes(plan)
    return [nodes.index(_next_node(slot.node, plan)) for slot in trainer_slots(plan)]


async def start_keepers(builder: Builder) -> RankGroup:
    """Start a copy keeper on each node that follows, in the plan, a node with ranks."""
    settings, keepers = builder.recipe.machine, list[ActorHandle]()
    for number, node in enumerate(_keeper_nodes(builder.plan)):
        keepers.append(
            await builder.cluster.spawn(
                f"copy keeper {number}",
                KEEPER_TARGET,
                node=node,
                num_cpus=0.0,
                kwargs={},
                environment={},
            )
        )
    return RankGroup(
        cluster=builder.cluster,
        ranks=keepers,
        pids=await start_all(keepers, timeout_s=settings.start_timeout_s),
        layout=TrainerLayout(),
        step_timeout_s=settings.step_timeout_s,
    )


def _keeper_nodes(plan: Plan) -> list[int]:
    return sorted({_next_node(slot.node, plan) for slot in trainer_slots(plan)})


def _next_node(node: int, plan: Plan) -> int:
    """Return the node that follows in the plan; after the last one the first."""
    nodes = sorted({slot.node for slot in plan.slots})
    return nodes[(nodes.index(node) + 1) % len(nodes)]
