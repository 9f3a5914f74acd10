"""One process of ours, wherever in the cluster it runs: calls that are bounded, looks at whether it
lives, and errors that name it. Made by `cluster.Cluster.spawn`."""

from __future__ import annotations

import asyncio
import pickle
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milescli.backends.ray.nodes import DEATH_NOTICE_S, ClusterNode, find_dead, node_died
from milescli.core.concurrency import in_thread
from milescli.core.errors import MilesError, OutOfMemory, WaitTimeout, WorkerKilled
from milescli.core.files import last_log_lines, log_age
from milescli.core.units import format_bytes
from milescli.platform.memory_record import last_look

STATUS = "status"
"""What a look without a method asks: it says nothing of what the process did."""
LOOK_TIMEOUT_S = 3.0
"""For a process to say that it is there. A busy machine may take longer: one look proves
nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorHandle:
    """One of our processes, wherever it runs."""

    name: str
    """As people read it: `trainer rank 3`, `engine 0`."""
    actor: Any
    log_path: Path
    node: ClusterNode
    """Where it runs."""
    kwargs: dict[str, Any] = field(repr=False)
    """From which `start` builds the hosted object."""

    async def run(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Call a method of the hosted object. Raises what it raised, WorkerKilled where its process
        ended, or WaitTimeout."""
        return await _bounded(self, self.actor.run.remote(method, args, kwargs), method, timeout_s)

    async def start(self, *, timeout_s: float) -> int:
        """Build the hosted object; returns its pid."""
        ref = self.actor.start.remote(pickle.dumps(self.kwargs), str(self.log_path))
        return await _bounded(self, ref, "start", timeout_s)

    async def look(self, method: str | None = None, *, timeout_s: float = LOOK_TIMEOUT_S) -> Any:
        """At the process: what a quick method says, or (phase, seconds) of what it does; None where
        it does not speak within the time. Raises WorkerKilled where it has ended."""
        asked = self.actor.peek.remote(method) if method else self.actor.status.remote()
        is_done = await _is_done(asked, timeout_s)
        return await _result(self, asked, method or STATUS) if is_done else None

    def hand_over(self, method: str, *args: Any) -> Any:
        """A reference to what a quick method says, which `run` of another process takes as an
        argument: it does not pass through this one."""
        return self.actor.peek.remote(method, *args)

    async def phase(self, *, timeout_s: float = LOOK_TIMEOUT_S) -> str:
        """What it does now, for messages; never raises."""
        try:
            name, seconds = await asyncio.wait_for(as_future(self.actor.status.remote()), timeout_s)
        except Exception as error:  # any failure to answer says enough
            return f"does not answer ({type(error).__name__})"
        return f"is in `{name}` for {seconds:.0f} s"


async def as_future(ref: Any) -> Any:
    """A coroutine of what Ray only calls awaitable."""
    return await ref


async def _bounded(handle: ActorHandle, ref: Any, method: str, timeout_s: float) -> Any:
    """What the call returns. Raises as `ActorHandle.run`."""
    if await _is_done(ref, timeout_s):
        return await _result(handle, ref, method)
    raise WaitTimeout(
        f"waited {timeout_s:.0f} s for {handle.name} to finish `{method}`",
        why=f"{handle.name} {await handle.phase()}; its log was last written "
        f"{log_age(handle.log_path)}",
        fix=f"tail -50 {handle.log_path}",
    )


async def _is_done(ref: Any, timeout_s: float) -> bool:
    """Whether the call ends within the time, well or not."""
    waiting = asyncio.ensure_future(as_future(ref))
    try:
        return bool((await asyncio.wait({waiting}, timeout=timeout_s))[0])
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def _result(handle: ActorHandle, ref: Any, method: str) -> Any:
    """Of a call that has ended."""
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
            said = str(cause).partition("\n")[0]
            raise out_of_memory(handle, method, f"{type(cause).__name__}: {said}") from None
        raise


def _is_out_of_memory(error: Exception) -> bool:
    """torch says so of a GPU by a type of its own, and of main memory by its words alone."""
    is_named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_named or "can't allocate memory" in str(error)


def _limit_of_ray(text: str) -> str:
    """The one line that matters of 40: `... was 22.6GB used / 23.4GB limit (0.96)`."""
    found = re.search(r"([\d.]+)GB(?: used)? / ([\d.]+)GB", text)
    if found is None:
        return "the computer's memory was nearly full"
    return f"{found[1]} of the computer's {found[2]} GB were in use, and Ray ends processes then"


def out_of_memory(handle: ActorHandle, method: str, said: str) -> OutOfMemory:
    """Names the process, what it did, what each process of the run held, and what needs less.
    `said`: why the memory was not to be had."""
    folder = handle.log_path.parent
    held = sorted(last_look(folder).items(), key=lambda each: -each[1])
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in held[:4])
    run = folder.parents[1]
    again = f"miles launch --recipe {run}/recipe.yaml"
    return OutOfMemory(
        f"{handle.name} ran out of memory" + f" during `{method}`" * (method != STATUS),
        why=f"{said}; held a moment before: {sizes or 'unknown'}",
        fix=[
            f"{again} --name {run.name}-lora --lora 16   # train an adapter",
            f"{again} --name {run.name}-short --set train.max_tokens_per_microbatch=2048 "
            "--set train.recompute=full   # fewer tokens at once",
            f"{again} --name {run.name}-bf16 --set train.precision=bf16   # half the weights",
            f"{again} --dry-run -v   # what needs how much",
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
