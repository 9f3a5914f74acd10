"""Bytes from the memory of one of our processes to that of another, on any node, by Ray's object
store: in chunks, so that little of it is taken at once. The caller's process sees none of them."""

from __future__ import annotations

from typing import Any

from milescli.backends.ray.actor import ActorHandle
from milescli.core.errors import WorkerDied
from milescli.core.units import MIB

CHUNK_BYTES = 16 * MIB


async def move(
    size_bytes: int,
    *,
    source: ActorHandle,
    read: tuple[Any, ...],
    sink: ActorHandle,
    write: tuple[Any, ...],
    timeout_s: float,
) -> None:
    """`read`: a quick method of the source, and what it is asked before (offset, bytes); it returns
    an array of them. `write`: a method of the sink, and what it is told before (offset, array).
    `timeout_s`: of a chunk. Raises WorkerDied or WaitTimeout."""
    import ray

    for offset in range(0, size_bytes, CHUNK_BYTES):
        chunk = source.hand_over(*read, offset, min(CHUNK_BYTES, size_bytes - offset))
        try:
            await sink.run(*write, offset, chunk, timeout_s=timeout_s)
        except (WorkerDied, ray.exceptions.RayError) as error:
            await sink.look()  # where it has ended, this says so; else it is the source
            raise WorkerDied(
                f"{source.name} gave no bytes to {sink.name}",
                why=str(error).strip().splitlines()[0],
                fix=f"less {source.log_path}",
            ) from None
