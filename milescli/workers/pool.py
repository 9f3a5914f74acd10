"""Runs as many processes of one target as its calls need: one that does not answer in time is
ended, and only the call that was too slow fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from typing import Any

from milescli.workers.worker import EvictedCall, UserWorker

GROW_AFTER_S = 0.5
"""Calls that compute finish soonest with as many workers as cores. If a call has waited this many
seconds while all workers are busy, their calls wait for something else, and further workers are
started."""


class WorkerPool:
    """Holds the workers of one target. Belongs to one event loop."""

    def __init__(
        self,
        target: str,
        *,
        memory_bytes: int,
        memory_key: str,
        max_workers: int,
        calls_each: int = 1,
    ) -> None:
        """Set up the pool. `target`, `memory_bytes`, `memory_key`: as in UserWorker; `calls_each`:
        concurrent calls of one worker, 1 unless the target is async."""
        self._arguments = (target, memory_bytes, memory_key)
        self._calls_each, self._max_workers = calls_each, max_workers
        self._first_workers = min(max(2, len(os.sched_getaffinity(0))), max_workers)
        self.workers: dict[UserWorker, int] = {}
        """Living workers, with the number of calls of each."""
        self._freed = asyncio.Event()
        self.close = weakref.finalize(self, _end_all, self.workers)
        """Ends all workers."""

    async def call(self, *args: Any, timeout_s: float) -> Any:
        """Call the target in a free worker. Raises what UserWorker raises, and TimeoutError with
        the lines that it was executing if it takes longer than `timeout_s`."""
        while True:
            worker = await self._free_worker()
            try:
                return await self._call(worker, args, timeout_s)
            except EvictedCall:
                continue  # the call that was to blame raises, or gets a worker of its own
            finally:
                self._give_back(worker)

    async def _call(self, worker: UserWorker, args: tuple[Any, ...], timeout_s: float) -> Any:
        number, reply = worker.call(*args)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(reply)
        except TimeoutError:
            where = await asyncio.to_thread(worker.end_and_locate)
            raise TimeoutError(f"it did not return within {timeout_s:g} s{where}") from None
        except asyncio.CancelledError:
            if self._calls_each == 1:
                worker.end("nobody waits for it any more")
            else:
                worker.cancel(number)
            raise

    def _give_back(self, worker: UserWorker) -> None:
        if worker in self.workers:
            self.workers[worker] -= 1
        self._freed.set()

    async def _free_worker(self) -> UserWorker:
        worker = self._idle_worker()
        while worker is None:
            self._freed.clear()
            are_at_work = all(worker.ready.done() for worker in self.workers)
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
            self._give_back(worker)
            raise
        return worker

    def _idle_worker(self, *, may_grow: bool = False) -> UserWorker | None:
        """Return a worker that can take a call; a new one if none can and another may be started;
        else None."""
        for worker in [worker for worker in self.workers if not worker.lives]:
            del self.workers[worker]
        for worker, num_calls in self.workers.items():
            if num_calls < self._calls_each:
                self.workers[worker] += 1
                return worker
        if len(self.workers) >= (self._max_workers if may_grow else self._first_workers):
            return None
        worker = UserWorker(*self._arguments)
        self.workers[worker] = 1
        return worker


def _end_all(workers: dict[UserWorker, int]) -> None:
    for worker in list(workers):
        with contextlib.suppress(OSError):
            worker.end()
