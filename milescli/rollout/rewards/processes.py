"""Runs a user's reward in processes of its own, as many as its calls need."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from milescli.rollout.rewards.forms import Form
from milescli.workers.pool import WorkerPool

MEMORY_KEY = "rollout.reward_memory_gib"
CALLS_AT_ONCE = 256
"""Concurrent calls of an async reward, and responses in one call of a batched one."""
MAX_WORKERS = 32
"""Most worker processes of a plain reward."""


class ProcessReward:
    """Calls a reward in worker processes that are started on demand. Belongs to one event loop; the
    scorer limits the calls to `max_concurrency`."""

    def __init__(
        self,
        path: str,
        *,
        form: Form,
        is_async: bool,
        memory_bytes: int,
        timeout_s: float,
        max_concurrency: int | None = None,
        takes_images: bool = False,
    ) -> None:
        """Set up the workers. `path`: import path that resolves; `timeout_s`: passed to a reward
        with `within`; `max_concurrency`: as the reward declares; `takes_images`: a reward of one
        response with a parameter `images`."""
        self.__name__ = path
        self.form = form
        self.takes_images = takes_images
        self._arguments = (path, timeout_s)
        most = max_concurrency or CALLS_AT_ONCE
        calls_each = min(CALLS_AT_ONCE, most) if is_async else 1
        max_workers = 1 if is_async else min(MAX_WORKERS, most)
        if form is Form.BATCH:
            max_workers = 1  # a second would make batches smaller
        self.max_concurrency = CALLS_AT_ONCE if form is Form.BATCH else max_workers * calls_each
        """Calls that make sense at once."""
        self.pool = WorkerPool(
            f"milescli.rollout.rewards.forms:{'score_async' if is_async else 'score'}",
            memory_bytes=memory_bytes,
            memory_key=MEMORY_KEY,
            max_workers=max_workers,
            calls_each=calls_each,
        )
        self._batch: list[tuple[Sequence[Any], asyncio.Future[float]]] = []
        self._batching: asyncio.Task[None] | None = None

    @property
    def scores_groups(self) -> bool:
        """Return True if it scores all responses to a prompt at once."""
        return self.form is Form.GROUP

    async def score(
        self,
        *,
        prompt: str,
        response: str,
        label: str | None,
        timeout_s: float,
        images: Sequence[bytes] = (),
    ) -> object:
        """Score one response. Raises CallFailed, or TimeoutError with the lines that it was
        executing after `timeout_s`."""
        if self.form is not Form.BATCH:
            shown = {"images": list(images)} if self.takes_images else {}
            return await self._call((prompt, response, label), timeout_s, **shown)
        reward: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._batch.append(((prompt, response, label), reward))
        if self._batching is None or self._batching.done():
            self._batching = asyncio.create_task(self._score_batches(timeout_s))
        return await reward

    async def score_group(
        self, *, prompt: str, responses: list[str], label: str | None, timeout_s: float
    ) -> list[float]:
        """Score all responses to one prompt; Form.GROUP. Raises as `score`."""
        return await self._call((prompt, responses, label), timeout_s)

    async def _score_batches(self, timeout_s: float) -> None:
        """Score batches; responses that arrive meanwhile form the next batch."""
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

    async def _call(self, values: Sequence[Any], timeout_s: float, **more: Any) -> Any:
        question = {**dict(zip(self.form.value, values, strict=True)), **more}
        return await self.pool.call(*self._arguments, question, timeout_s=timeout_s)

    def close(self) -> None:
        """End all workers."""
        self.pool.close()
