"""Many actors that act as one: the same call on every rank, and the first cause where one of them
fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from milescli.backends.ray.actor import ActorHandle
from milescli.core.errors import WorkerDied
from milescli.core.silence import sounds_like_lost_peer

GRACE_S = 3.0
"""How long we listen for a better cause after the first error: a killed rank makes its peers fail
at almost the same time."""


async def run_all(
    handles: Sequence[ActorHandle], method: str, *args: Any, timeout_s: float, **kwargs: Any
) -> list[Any]:
    """[rank] results of the same method on every rank. Raises the error that best names the first
    cause."""
    tasks = [
        asyncio.ensure_future(handle.run(method, *args, timeout_s=timeout_s, **kwargs))
        for handle in handles
    ]
    return await gather_all(tasks)


async def start_all(handles: Sequence[ActorHandle], *, timeout_s: float) -> list[int]:
    """Build all hosted objects at once; pids by rank."""
    return await gather_all(
        [asyncio.ensure_future(handle.start(timeout_s=timeout_s)) for handle in handles]
    )


async def gather_all(tasks: Sequence[asyncio.Future[Any]]) -> list[Any]:
    """Their results; the error that best names the first cause where one fails. None runs on
    afterwards."""
    if not tasks:
        return []
    try:
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if any(task.exception() for task in done) and pending:
            more, _ = await asyncio.wait(pending, timeout=GRACE_S)
            done |= more
        errors = [error for task in tasks if task in done and (error := task.exception())]
        if errors:
            raise min(errors, key=_distance_to_cause)
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _distance_to_cause(error: BaseException) -> int:
    """0 is nearest: a process that ended, then an explained error, then the symptoms of lost
    peers."""
    if isinstance(error, WorkerDied) and " died " in error.what:
        return 0
    return 2 if sounds_like_lost_peer(str(error)) else 1
