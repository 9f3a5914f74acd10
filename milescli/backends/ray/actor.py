"""Processes of a run, wherever in the cluster they run: bounded calls of one or of many, checks
whether one lives, errors that name it, and transfers of bytes from the memory of one to another.
Made by `cluster.Cluster.spawn`."""

from __future__ import annotations

import asyncio
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from milescli.backends.ray.nodes import DEATH_NOTICE_S, ClusterNode, find_dead, node_died
from milescli.core.concurrency import in_thread
from milescli.core.errors import MilesError, OutOfMemory, WaitTimeout, WorkerDied, WorkerKilled
from milescli.core.files import last_log_lines, log_age
from milescli.core.silence import sounds_like_lost_peer
from milescli.core.units import MIB, format_bytes
from milescli.platform.memory_record import last_sample

NO_SECRETS: Mapping[str, str] = MappingProxyType({})
STATUS = "status"
"""Method name of a check that calls nothing, so its answer says nothing about the process's
work."""
LOOK_TIMEOUT_S = 3.0
"""Time for a process to respond. A busy machine may take longer: one check proves nothing."""

GRACE_S = 3.0
"""Seconds, after the first error, to wait for a better cause: when a rank is killed, its peers fail
at almost the same time."""
CHUNK_BYTES = 16 * MIB
"""Bytes moved at a time, so that little of Ray's object store is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorHandle:
    """Represents one process of a run, wherever it runs."""

    name: str
    """Name for people: `trainer rank 3`, `engine 0`."""
    actor: Any
    log_path: Path
    node: ClusterNode
    """Node on which it runs."""
    kwargs: dict[str, Any] = field(repr=False)
    """Arguments from which `start` builds the hosted object."""

    async def run(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Call a method of the hosted object and return its result. Raises what it raised,
        WorkerKilled if its process ended, or WaitTimeout."""
        return await _bounded(self, self.actor.run.remote(method, args, kwargs), method, timeout_s)

    async def run_in_parts(
        self, method: str, *args: Any, num_parts: int, timeout_s: float
    ) -> tuple[Any, list[Any]]:
        """Call a method that yields a small result and then `num_parts` parts. Return that result,
        and references to the parts, which stay where they are and outlive the process. Raises as
        `run`."""
        call = self.actor.run.options(num_returns=1 + num_parts)
        first, *parts = call.remote(method, args, {})
        return await _bounded(self, first, method, timeout_s), parts

    async def start(self, *, timeout_s: float, secrets: Mapping[str, str] = NO_SECRETS) -> int:
        """Build the hosted object; return its pid. `secrets`: variables of this environment that
        the process gets because it runs the user's code or sends requests; they are stored in no
        file."""
        kwargs, log_path = pickle.dumps(self.kwargs), str(self.log_path)
        ref = self.actor.start.remote(kwargs, log_path, dict(secrets))
        return await _bounded(self, ref, "start", timeout_s)

    async def look(self, method: str | None = None, *, timeout_s: float = LOOK_TIMEOUT_S) -> Any:
        """Check the process: return the result of a quick method, or (current phase, its seconds);
        None if it does not answer in time. Raises WorkerKilled if it has ended."""
        reply = self.actor.peek.remote(method) if method else self.actor.status.remote()
        is_done = await _is_done(reply, timeout_s)
        return await _result(self, reply, method or STATUS) if is_done else None

    def hand_over(self, method: str, *args: Any) -> Any:
        """Return a reference to the result of a quick method, which `run` of another process
        accepts as an argument: the result does not pass through this process."""
        return self.actor.peek.remote(method, *args)

    async def phase(self, *, timeout_s: float = LOOK_TIMEOUT_S) -> str:
        """Return its current phase for messages; never raises."""
        try:
            name, seconds = await asyncio.wait_for(as_future(self.actor.status.remote()), timeout_s)
        except Exception as error:  # any failure to answer says enough
            return f"does not answer ({type(error).__name__})"
        return f"is in `{name}` for {seconds:.0f} s"


async def run_all(
    handles: Sequence[ActorHandle], method: str, *args: Any, timeout_s: float, **kwargs: Any
) -> list[Any]:
    """Return [rank] the results of the same method on every rank. Raises the error that best names
    the first cause."""
    tasks = [
        asyncio.ensure_future(handle.run(method, *args, timeout_s=timeout_s, **kwargs))
        for handle in handles
    ]
    return await gather_all(tasks)


async def start_all(
    handles: Sequence[ActorHandle], *, timeout_s: float, secrets: Mapping[str, str] = NO_SECRETS
) -> list[int]:
    """Build all hosted objects at once; return their pids by rank. `secrets`: as for
    `ActorHandle.start`."""
    return await gather_all(
        [
            asyncio.ensure_future(handle.start(timeout_s=timeout_s, secrets=secrets))
            for handle in handles
        ]
    )


async def gather_all(tasks: Sequence[asyncio.Future[Any]]) -> list[Any]:
    """Return the results. If one fails, cancel the others and raise the error that best names the
    first cause."""
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
    """Rank an error: 0 for a process that ended, 1 for an explained error, 2 for a symptom of lost
    peers."""
    if isinstance(error, WorkerDied) and " died " in error.what:
        return 0
    return 2 if sounds_like_lost_peer(str(error)) else 1


async def move(
    size_bytes: int,
    *,
    source: ActorHandle,
    read: tuple[Any, ...],
    sink: ActorHandle,
    write: tuple[Any, ...],
    timeout_s: float,
) -> None:
    """Move bytes through Ray's object store, but not through the caller's process. `read`: a quick
    method of the source, and its arguments before (offset, bytes); it returns an array of them.
    `write`: a method of the sink, and its arguments before (offset, array). `timeout_s`: of a
    chunk. Raises WorkerDied or WaitTimeout."""
    import ray

    for offset in range(0, size_bytes, CHUNK_BYTES):
        chunk = source.hand_over(*read, offset, min(CHUNK_BYTES, size_bytes - offset))
        try:
            await sink.run(*write, offset, chunk, timeout_s=timeout_s)
        except (WorkerDied, ray.exceptions.RayError) as error:
            await sink.look()  # where it has ended, this says so; else it is the source
            raise WorkerDied(
                f"{source.name} sent no bytes to {sink.name}",
                why=str(error).strip().splitlines()[0],
                fix=f"less {source.log_path}",
            ) from None


async def as_future(ref: Any) -> Any:
    """Return a coroutine that awaits an object which Ray only calls awaitable."""
    return await ref


async def _bounded(handle: ActorHandle, ref: Any, method: str, timeout_s: float) -> Any:
    """Return the result of the call. Raises as `ActorHandle.run`."""
    if await _is_done(ref, timeout_s):
        return await _result(handle, ref, method)
    raise WaitTimeout(
        f"waited {timeout_s:.0f} s for {handle.name} to finish `{method}`",
        why=f"{handle.name} {await handle.phase()}; its log was last written "
        f"{log_age(handle.log_path)}",
        fix=f"tail -50 {handle.log_path}",
    )


async def _is_done(ref: Any, timeout_s: float) -> bool:
    """Return True if the call ends in time, successfully or not."""
    waiting = asyncio.ensure_future(as_future(ref))
    try:
        return bool((await asyncio.wait({waiting}, timeout=timeout_s))[0])
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def _result(handle: ActorHandle, ref: Any, method: str) -> Any:
    """Return the result of a call that has ended, or raise its error."""
    import ray

    try:
        return await as_future(ref)
    except ray.exceptions.RayActorError as error:
        unsure = isinstance(error, ray.exceptions.ActorUnavailableError)
        within_s = DEATH_NOTICE_S if unsure else 0.0
        if await in_thread(lambda: find_dead([handle.node], within_s=within_s)):
            raise node_died(handle.node, f"{handle.name} was in `{method}` there") from None
        raise WorkerKilled(
            f"{handle.name} died during `{method}`",
            why=f"{_death_cause(error)}; last lines of its log:\n{last_log_lines(handle.log_path)}",
            fix=f"less {handle.log_path}",
        ) from None
    except ray.exceptions.OutOfMemoryError as error:
        raise out_of_memory(handle, method, _limit_of_ray(str(error))) from None
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else None
        if isinstance(cause, MilesError):
            raise cause from None
        if cause is not None and _is_out_of_memory(cause):
            reason = str(cause).partition("\n")[0]
            raise out_of_memory(handle, method, f"{type(cause).__name__}: {reason}") from None
        raise


def _is_out_of_memory(error: Exception) -> bool:
    """Return True if memory ran out: torch raises its own type for a GPU, and RuntimeError for main
    memory."""
    is_named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_named or "can't allocate memory" in str(error)


def _limit_of_ray(text: str) -> str:
    """Return the one relevant line of 40: `... was 22.6GB used / 23.4GB limit (0.96)`."""
    match = re.search(r"([\d.]+)GB(?: used)? / ([\d.]+)GB", text)
    if match is None:
        return "the computer's memory was nearly full"
    return f"{match[1]} of the computer's {match[2]} GB were in use, and Ray ends processes then"


def out_of_memory(handle: ActorHandle, method: str, reason: str) -> OutOfMemory:
    """Return an error that names the process, its call, the memory of each process of the run, and
    settings that need less. `reason`: why the allocation failed."""
    folder = handle.log_path.parent
    used = sorted(last_sample(folder).items(), key=lambda each: -each[1])
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in used[:4])
    run = folder.parents[1]
    again = f"miles launch --recipe {run}/recipe.yaml"
    return OutOfMemory(
        f"{handle.name} ran out of memory" + f" during `{method}`" * (method != STATUS),
        why=f"{reason}; shortly before, it used: {sizes or 'unknown'}",
        fix=[
            f"{again} --name {run.name}-lora --lora 16   # train an adapter",
            f"{again} --name {run.name}-short --set train.max_tokens_per_microbatch=2048 --set "
            "train.recompute=full   # fewer tokens at once",
            f"{again} --name {run.name}-bf16 --set train.precision=bf16   # half the weights",
            f"{again} --dry-run -v   # shows what needs how much memory",
        ],
    )


def _death_cause(error: Exception) -> str:
    text = str(error)
    for line in text.splitlines():
        if (
            "exit detail" in line.lower()
            or "died unexpectedly" in line
            or "exit type" in line.lower()
        ):
            return line.strip()
    return text.splitlines()[0] if text else type(error).__name__
