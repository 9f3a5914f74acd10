"""Drives the processes that collect (`process`): decides which process samples which prompt, sends
many orders and receives many reports at once, and replaces a process that dies. Order, seeds,
filters and batches stay the work of `rollout.collect`."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from milescli.backends.ray.actor import ActorHandle
from milescli.backends.sglang.client.fleet import SglangFleet
from milescli.core.concurrency import all_or_first_error, in_thread
from milescli.core.errors import WaitTimeout, WorkerDied
from milescli.core.types import EngineAddress, Group, Prompt
from milescli.recipe.schema import Recipe
from milescli.rollout.collect.collector import Progress
from milescli.rollout.collect.remote_groups import GroupNumbers
from milescli.runtime.collecting.followers import FleetFollower
from milescli.runtime.collecting.process import (
    REPORT_EVERY_S,
    CollectorReport,
    GroupOrder,
    SequenceOrder,
    as_row,
)
from milescli.runtime.collecting.share import collector_name, part_of
from milescli.runtime.collecting.workers import GroupRequest, Worker, Workers
from milescli.runtime.recording.sample_journal import SampleJournal
from milescli.runtime.recovery.restarts import Repairs, with_refusal
from milescli.train.advantages import AdvantageRows
from milescli.train.base import ScatteredShard, SequenceOutline, TrainBatch
from milescli.train.objectives.policy import Policy
from milescli.train.packing import plan_shards

BYTES_PER_TOKEN = 13
"""Approximate size of a sequence on its way to a rank; the watch of the ranks compares it."""
Start = Callable[[int, list[EngineAddress]], Awaitable[ActorHandle]]
"""Starts the process with this number, which sends its requests to these engines."""


class Collectors:
    """Implements `rollout.collect.collector.GroupSampler`, and `Followers` of the fleet.
    Belongs to one event loop."""

    def __init__(
        self,
        start: Start,
        kill: Callable[[Sequence[ActorHandle]], Awaitable[None]],
        *,
        count: int,
        recipe: Recipe,
        fleet: SglangFleet,
        journal: SampleJournal | None,
        repairs: Repairs,
        warn: Callable[[str], None],
        adapter: str | None = None,
        policies: Mapping[str, SglangFleet] | None = None,
        scorer: Callable[[], ActorHandle | None] = lambda: None,
    ) -> None:
        """Set up collection. `adapter`: the one of several for which they collect. `policies`: the
        clients of the models that play untrained roles, by their names in `rollout.policies`.
        `scorer` returns the process that holds the reward model now."""
        self._start, self._kill = start, kill
        self._fleet, self._journal, self._repairs, self._warn = fleet, journal, repairs, warn
        self._timeout_s, self._run = recipe.machine.step_timeout_s, recipe.run.name or "RUN"
        self._workers = Workers(count, timeout_s=self._timeout_s)
        self._following = FleetFollower(self._workers, fleet)
        self._frozen = {
            name: FleetFollower(self._workers, served, policy=name)
            for name, served in (policies or {}).items()
        }
        self._adapter, self._scorer = adapter, scorer
        self._tasks = list[asyncio.Task[None]]()
        self._failure: BaseException | None = None
        self._silence_s = REPORT_EVERY_S + MAX_REPORT_SLOWDOWN * recipe.machine.silence_s
        self._tickets: dict[tuple[int, int], int] = {}
        """(epoch, index of the prompt) -> ticket, of groups that are not released."""
        self._num_orders = 0
        self._changed = list[int]()
        """Tickets of groups that were lost when a step could have used them, and have been sampled
        again since."""

    async def open(self) -> None:
        """Start all processes. Raises the error of the first one that cannot start."""
        await asyncio.gather(*(self._begin(worker) for worker in self._workers))
        for following in (self._following, *self._frozen.values()):
            following.begin()
        if self._journal is not None:
            self._journal.on_checkpoint = self._checkpoint
        for worker in self._workers:
            for serve in (self._send, self._receive):
                self._tasks.append(asyncio.create_task(self._serve_forever(worker, serve)))

    async def _begin(self, worker: Worker) -> None:
        handle = await self._start(worker.number, self._following.engines_of(worker))
        await handle.run("open", timeout_s=self._timeout_s)
        worker.handle = handle
        await self._following.catch_up(worker)
        for name, following in self._frozen.items():
            await self._workers.call(worker, "use", following.engines_of(worker), name)
        if (scorer := self._scorer()) is not None:
            await self._workers.call(worker, "use_scorer", scorer)
        worker.ready.set()

    def use_scorer(self, process: ActorHandle) -> None:
        """Let all processes send requests to this process of the reward model, which replaces a
        dead one."""
        for worker in self._workers:
            self._workers.send(worker, "use_scorer", process)

    async def close(self) -> None:
        """End all processes. Idempotent."""
        for following in (self._following, *self._frozen.values()):
            following.end()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._workers.cancel_background()
        handles = [worker.handle for worker in self._workers if worker.handle is not None]
        closing = (handle.run("close", timeout_s=CLOSE_TIMEOUT_S) for handle in handles)
        await asyncio.gather(*closing, return_exceptions=True)
        await self._kill(handles)
        for worker in self._workers:
            worker.handle = None

    def _new_ticket(self, position: int) -> int:
        """Return a number that no other order has: a cancelled order may still be reported, while
        the same prompt is ordered again."""
        self._num_orders += 1
        count = len(self._workers)
        return self._num_orders * count + position % count

    # ------------------------------------------------------------------ groups

    async def group(
        self, epoch: int, prompt: Prompt, position: int, progress: Progress
    ) -> Group | None:
        if self._failure is not None:
            raise self._failure
        worker = self._workers.of(ticket := self._new_ticket(position))
        future: asyncio.Future[Group | None] = asyncio.get_running_loop().create_future()
        worker.requests[ticket] = GroupRequest(position, epoch, prompt, progress.step, future)
        self._tickets[epoch, prompt.index] = ticket
        worker.orders.append(ticket)
        worker.wake.set()
        try:
            group = await future
        except asyncio.CancelledError:
            self._forget(worker, ticket)
            worker.cancelled.append(ticket)
            worker.wake.set()
            raise
        if group is None:
            self._forget(worker, ticket)
            return None
        progress.num_done += len(group.samples)
        progress.num_tokens += sum(sample.num_loss_tokens for sample in group.samples)
        progress.last_done = time.monotonic()
        return group

    def _forget(self, worker: Worker, ticket: int) -> None:
        if (request := worker.requests.pop(ticket, None)) is not None:
            place = request.epoch, request.prompt.index
            if self._tickets.get(place) == ticket:
                del self._tickets[place]
        if ticket in worker.orders:
            worker.orders.remove(ticket)

    def release(self, groups: Sequence[Group], *, before: int) -> None:
        """Drop these groups, and all finished ones of prompts before position `before` of the
        source: no step takes them any more."""
        gone = {self._ticket(group) for group in groups}
        for worker in self._workers:
            own = [
                ticket
                for ticket, request in worker.requests.items()
                if ticket in gone or (request.position < before and request.future.done())
            ]
            for ticket in own:
                self._forget(worker, ticket)
            if own:
                worker.released += own
                worker.wake.set()

    def _ticket(self, group: Group) -> int:
        return self._tickets[group.epoch, group.prompt.index]

    async def _serve_forever(
        self, worker: Worker, serve: Callable[[Worker], Awaitable[None]]
    ) -> None:
        """Call `serve` with the worker as long as the run lasts; continue with its replacement if
        it dies."""
        while True:
            await worker.ready.wait()
            handle = worker.handle
            try:
                await serve(worker)
            except WorkerDied as error:
                if worker.handle is handle:
                    worker.ready.clear()
                    worker.handle = None
                    try:
                        await self._replace(worker, error, handle)
                    except Exception as failure:
                        self._fail(failure)
                        raise
            except Exception as failure:
                self._fail(failure)
                raise

    async def _send(self, worker: Worker) -> None:
        await worker.wake.wait()
        worker.wake.clear()
        await asyncio.sleep(0)  # all that is asked at one moment goes together
        orders = [self._order(worker, ticket) for ticket in worker.orders]
        cancelled, released = worker.cancelled, worker.released
        worker.orders, worker.cancelled, worker.released = [], [], []
        await self._workers.call(worker, "take", orders, cancelled, released)

    def _order(self, worker: Worker, ticket: int) -> tuple[Any, ...]:
        request, journal = worker.requests[ticket], self._journal
        position, step = request.position, request.step
        recorded = journal.recorded(step, position) if journal is not None else None
        return tuple(
            GroupOrder(ticket, position, request.epoch, as_row(request.prompt), step, recorded)
        )

    async def _receive(self, worker: Worker) -> None:
        try:
            report: CollectorReport = await worker.call("report", timeout_s=self._silence_s)
        except WaitTimeout as error:
            raise WorkerDied(error.what, why=error.why, fix=error.fixes) from None
        now = time.monotonic()
        worker.engines = {url: (num, now - ago) for url, (num, ago) in report.engines.items()}
        for warning in report.warnings:
            self._warn(warning)
        if report.lost_records and (journal := self._journal) is not None:
            self._distrust(worker, journal)
        for ticket, error in report.errors.items():
            if (request := worker.requests.get(ticket)) is not None:
                if request.future.done():
                    raise error
                request.future.set_exception(error)
        for ticket in report.unscored:
            if (request := worker.requests.get(ticket)) is not None:
                if request.future.done():
                    raise self._lost_error(1)
                request.future.set_result(None)
        if report.numbers is not None:
            self._note(worker, report.numbers)

    def _distrust(self, worker: Worker, journal: SampleJournal) -> None:
        """Let no process use recorded groups, because this one could not read some of its own."""
        if num_groups := journal.distrust():
            self._warn(f"{num_groups} groups of the journal are sampled again, too")
        for other in self._workers:
            if other is not worker:
                self._workers.send(other, "distrust")

    def _note(self, worker: Worker, numbers: GroupNumbers) -> None:
        tickets = numbers.tickets.tolist()
        of = dict.fromkeys(tickets, (0, NO_PROMPT))
        requests = {ticket: one for ticket in tickets if (one := worker.requests.get(ticket))}
        of |= {ticket: (one.epoch, one.prompt) for ticket, one in requests.items()}
        groups = numbers.groups(of)
        for ticket, one in requests.items():
            group = groups[ticket]
            worker.unreported.discard(ticket)
            if not one.future.done():
                one.future.set_result(group)
            elif (known := one.group) is not None and known.samples != group.samples:
                # it was lost, and sampled again by newer weights; those who wait for a step see it
                known.samples[:] = group.samples
                self._changed.append(ticket)

    def _fail(self, error: BaseException) -> None:
        """Make every wait raise this error."""
        self._failure = self._failure or error
        for worker in self._workers:
            worker.ready.set()
            for request in worker.requests.values():
                if not request.future.done():
                    request.future.set_exception(error)

    async def _replace(self, worker: Worker, error: WorkerDied, handle: ActorHandle | None) -> None:
        """Start another process in the place of a dead one, and order all groups that are not
        released again: the journal supplies recorded ones, and the rest have the same seeds."""
        name, began = collector_name(worker.number, self._adapter), time.monotonic()
        if refusal := self._repairs.begin(name, error):
            raise with_refusal(error, refusal)
        if handle is not None:
            await self._kill([handle])
        if (journal := self._journal) is not None:
            await in_thread(lambda: journal.read_part(part_of(worker.number)))
        await self._begin(worker)
        await self._workers.call(worker, "use", self._following.engines_of(worker), None)
        worker.orders, worker.unreported = list(worker.requests), set(worker.requests)
        worker.cancelled, worker.released = [], []
        worker.wake.set()
        recorded, lost = self._count_complete(worker)
        source = f"{recorded} samples from its journal" if recorded or not lost else ""
        again = f"{lost} complete samples lost, which are sampled again" if lost else ""
        source = ", ".join(part for part in (source, again) if part)
        self._repairs.done(name, began=began, source=source, lost_samples=lost)

    def _count_complete(self, worker: Worker) -> tuple[int, int]:
        """Return the numbers of complete samples that are not released: those in the journal, and
        others."""
        recorded = lost = 0
        for one in worker.requests.values():
            if (group := one.group) is not None:
                journal = self._journal
                has = journal is not None and journal.recorded(one.step, one.position) is not None
                recorded, lost = (
                    recorded + has * len(group.samples),
                    lost + (not has) * len(group.samples),
                )
        return recorded, lost

    # ------------------------------------------------------------------ batches

    async def batch(self, items: Sequence[Group], policy: Policy, **settings: Any) -> TrainBatch:
        """Return the batch of a step; the processes that hold its sequences send them to the ranks.
        `settings`: see `packing.plan_shards`."""

        in_driver = not policy.advantages_read_tokens

        def laid_out() -> tuple[list[SequenceOutline], Any, AdvantageRows]:
            outlines = policy.outlines(items)
            rows = policy.advantages(items) if in_driver else [()] * len(items)
            return outlines, plan_shards(outlines, **settings), rows

        changed = len(self._changed)
        tickets = [self._ticket(group) for group in items]
        self._require_known(items, tickets)
        outlines, layouts, rows = await in_thread(laid_out)
        none = np.zeros(1, np.int64)
        """A rank without a sequence has the streams of the first."""
        ranks = [ids if len(ids := layout.sequence_ids) else none for layout in layouts]
        firsts, at = list[int](), 0
        for number in range(len(items)):
            firsts.append(at)
            while at < len(outlines) and outlines[at].group == number:
                at += 1
        orders: dict[int, list[Any]] = {worker.number: [] for worker in self._workers}
        for number, (group, row) in enumerate(zip(items, rows, strict=True)):
            learned = [sample.is_learned for sample in group.samples]
            rewards = [] if in_driver else group.rewards
            own, ticket = list(row) if in_driver else None, tickets[number]
            # sent as a plain tuple, as an order is
            decided = (ticket, number, firsts[number], own, rewards, learned)
            orders[self._workers.of(ticket).number].append(decided)
        told = {
            "state": dict(policy.state),
            "ranks": ranks,
            "has_turn_rewards": policy.has_turn_rewards(items),
        }
        pieces = await all_or_first_error(
            self._pieces(worker, SequenceOrder(groups=orders[worker.number], **told))
            for worker in self._workers
            if orders[worker.number]
        )
        if gone := set(self._changed[changed:]).intersection(tickets):
            raise self._lost_error(len(gone))
        sizes = [
            BYTES_PER_TOKEN * sum([outlines[number].num_tokens for number in numbers.tolist()])
            for numbers in ranks
        ]
        return TrainBatch(
            shards=[
                ScatteredShard(
                    sequence_ids=layout.sequence_ids,
                    num_sequences=layout.num_sequences,
                    size_bytes=sizes[rank],
                    pieces=tuple(of_ranks[rank] for of_ranks in pieces),
                    join=layout.with_tokens,
                )
                for rank, layout in enumerate(layouts)
            ]
        )

    def _require_known(self, items: Sequence[Group], tickets: Sequence[int]) -> None:
        """Raise WorkerDied if a group is a shaped or filtered copy of samples that are lost."""
        gone = 0
        for group, ticket in zip(items, tickets, strict=True) if self._changed else ():
            known = self._workers.of(ticket).requests[ticket].group
            assert known is not None, ticket
            ours, theirs = ([one.trajectories for one in each.samples] for each in (group, known))
            gone += ours != theirs
        if gone:
            raise self._lost_error(gone)

    def _lost_error(self, num_groups: int) -> WorkerDied:
        return WorkerDied(
            f"the samples of {num_groups} groups were lost while a step learned from them",
            why="their process died, no journal has them, and newer weights sample others",
            fix=f"miles resume {shlex.quote(self._run)}   # from the newest checkpoint",
        )

    async def _pieces(self, worker: Worker, order: SequenceOrder) -> list[Any]:
        """Return [dp] references to the pieces."""
        tickets = {ticket for ticket, *_ in order.groups}
        _, pieces = await self._call_when_complete(
            worker,
            tickets,
            lambda handle: handle.run_in_parts(
                "make_pieces", order, num_parts=len(order.ranks), timeout_s=self._timeout_s
            ),
        )
        return pieces

    async def _call_when_complete(self, worker: Worker, tickets: set[int], call: Any) -> Any:
        """Call the process once it has these groups. If it dies meanwhile, repeat the call when its
        replacement has sampled them again."""
        while True:
            await worker.ready.wait()
            if self._failure is not None:
                raise self._failure
            handle = worker.handle
            try:
                assert handle is not None, worker
                await handle.run("made", sorted(tickets), timeout_s=self._timeout_s)
                while worker.unreported & tickets and worker.handle is handle and not self._failure:
                    await asyncio.sleep(NOTICE_S)  # else the driver may know other numbers
                return await call(handle)
            except WorkerDied:
                while worker.handle is handle and self._failure is None:
                    await asyncio.sleep(NOTICE_S)

    async def whole(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with their tokens and with the driver's decisions about them."""
        whole = list[Group]()
        for ticket, group in ((self._ticket(group), group) for group in groups):
            fetch = partial(_fetch_whole, decided={ticket: group}, timeout_s=self._timeout_s)
            made = await self._call_when_complete(self._workers.of(ticket), {ticket}, fetch)
            whole.append(replace(made[ticket], prompt=group.prompt))
        return whole

    def _checkpoint(self) -> None:
        journal = self._journal
        assert journal is not None

        async def tell() -> None:
            await self._workers.call_all("checkpoint", await in_thread(journal.oldest_kept))

        self._workers.start_background(tell())


async def _fetch_whole(
    handle: ActorHandle, *, decided: dict[int, Group], timeout_s: float
) -> dict[int, Group]:
    return await handle.run("whole", decided, timeout_s=timeout_s)


MAX_REPORT_SLOWDOWN = 4.0
"""Multiple of `machine.silence_s` that a busy process may take for a report."""
CLOSE_TIMEOUT_S = 60.0
"""Time for a process to write its queued journal records, and to end what it has started: packages
may have containers to clean up."""
NOTICE_S = 0.05
NO_PROMPT = Prompt(index=-1, token_ids=[], text="")
"""Stands in for the prompt of a group for which nobody waits any more."""
