"""Runs a user's reward in worker processes (`workers.worker`), as many as its calls need."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import Sequence
from typing import Any

from milescli.rollout.rewards.forms import Form
from milescli.workers.worker import Innocent, UserProcess

MEMORY_KEY = "rollout.reward_memory_gib"
CALLS_AT_ONCE = 256
"""Concurrent calls of an async reward, and responses in one call of a batched one."""
MAX_WORKERS = 32
"""Most worker processes of a plain reward."""
GROW_AFTER_S = 0.5
"""Plain rewards that compute are done sooner in as many workers as there are cores; where a call
has waited so long for workers that are all at work, they wait for something, and further ones are
begun."""


class ProcessReward:
    """A reward, called in worker processes that are started when they are needed. Belongs to one
    event loop; the scorer keeps to `max_concurrency` calls."""

    def __init__(
        self,
        path: str,
        *,
        form: Form,
        is_async: bool,
        memory_bytes: int,
        timeout_s: float,
        max_concurrency: int | None = None,
    ) -> None:
        """`path`: import path, which was resolved already; `timeout_s`: what the reward is told,
        where it has `within`; `max_concurrency`: as it says itself."""
        self.__name__ = path
        self.form = form
        self._said = (path, timeout_s)
        self._target = f"milescli.rollout.rewards.forms:{'score_async' if is_async else 'score'}"
        self._memory_bytes = memory_bytes
        most = max_concurrency or CALLS_AT_ONCE
        self._calls_each = min(CALLS_AT_ONCE, most) if is_async else 1
        self._most_workers = 1 if is_async else min(MAX_WORKERS, most)
        if form is Form.BATCH:
            self._most_workers = 1  # a second would make batches smaller
        self._first_workers = min(max(2, len(os.sched_getaffinity(0))), self._most_workers)
        self._workers: list[UserProcess] = []
        self._freed = asyncio.Event()
        self._batch: list[tuple[Sequence[Any], asyncio.Future[float]]] = []
        self._batching: asyncio.Task[None] | None = None
        self._end = weakref.finalize(self, _end_all, self._workers)

    @property
    def max_concurrency(self) -> int:
        """Calls that make sense at once."""
        if self.form is Form.BATCH:
            return CALLS_AT_ONCE
        return self._most_workers * self._calls_each

    @property
    def scores_groups(self) -> bool:
        """See BoundedReward."""
        return self.form is Form.GROUP

    async def score(
        self, *, prompt: str, response: str, label: str | None, timeout_s: float
    ) -> object:
        """What the reward says of one response. Raises CallFailed, or TimeoutError with where it
        was after `timeout_s`."""
        if self.form is not Form.BATCH:
            return await self._call((prompt, response, label), timeout_s)
        reward: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._batch.append(((prompt, response, label), reward))
        if self._batching is None or self._batching.done():
            self._batching = asyncio.create_task(self._score_batches(timeout_s))
        return await reward

    async def score_group(
        self, *, prompt: str, responses: list[str], label: str | None, timeout_s: float
    ) -> list[float]:
        """What it says of all responses to one prompt; Form.GROUP. Raises as `score`."""
        return await self._call((prompt, responses, label), timeout_s)

    async def _score_batches(self, timeout_s: float) -> None:
        """What has come while the call before ran is the next batch."""
        await asyncio.sleep(0)
        while self._batch:
            taken, self._batch[:] = self._batch[:CALLS_AT_ONCE], self._batch[CALLS_AT_ONCE:]
            waiting = [(asked, reward) for asked, reward in taken if not reward.done()]
            rewards, failure = list[float](), None
            try:
                columns = [
                    list(column) for column in zip(*(asked for asked, _ in waiting), strict=True)
                ]
                rewards = await self._call(columns, timeout_s) if waiting else []
            except Exception as error:  # whatever it is: who waits must hear of it
                failure = error
            for place, (_, reward) in enumerate(waiting):
                if reward.done():
                    continue
                if failure is not None:
                    reward.set_exception(failure)
                else:
                    reward.set_result(rewards[place])

    async def _call(self, asked: Sequence[Any], timeout_s: float) -> Any:
        question = dict(zip(self.form.value, asked, strict=True))
        while True:
            try:
                return await self._ask(await self._free_worker(), question, timeout_s)
            except Innocent:
                continue  # the call that was to blame raises, or gets a worker of its own

    async def _ask(self, worker: UserProcess, question: dict[str, Any], timeout_s: float) -> Any:
        number, reply = worker.call(*self._said, question)
        reply.add_done_callback(lambda _: worker.give_a_call_back())
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(reply)
        except TimeoutError:
            where = await asyncio.to_thread(worker.end_and_say_where)
            raise TimeoutError(f"it did not return within {timeout_s:g} s{where}") from None
        except asyncio.CancelledError:
            if self._calls_each == 1:
                worker.end("nobody waits for it any more")
            else:
                worker.cancel(number)
            raise
        finally:
            self._freed.set()

    def close(self) -> None:
        """End all workers."""
        self._end()

    async def _free_worker(self) -> UserProcess:
        worker = self._idle_worker()
        while worker is None:
            self._freed.clear()
            are_at_work = all(worker.ready.done() for worker in self._workers)
            has_waited = False
            try:
                async with asyncio.timeout(GROW_AFTER_S):
                    await self._freed.wait()
            except TimeoutError:
                has_waited = are_at_work
            worker = self._idle_worker(may_grow=has_waited)
        try:
            await asyncio.shield(asyncio.wrap_future(worker.ready))
        except BaseException:
            worker.give_a_call_back()
            raise
        return worker

    def _idle_worker(self, *, may_grow: bool = False) -> UserProcess | None:
        """One that has room for a call, which is taken; else a new one, where there may be."""
        self._workers[:] = [worker for worker in self._workers if worker.lives]
        for worker in self._workers:
            if worker.take_a_call(self._calls_each):
                return worker
        most = self._most_workers if may_grow else self._first_workers
        if len(self._workers) >= most:
            return None
        self._workers.append(
            UserProcess(self._target, self._memory_bytes, MEMORY_KEY, num_running=1)
        )
        return self._workers[-1]


def _end_all(workers: list[UserProcess]) -> None:
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.end()
