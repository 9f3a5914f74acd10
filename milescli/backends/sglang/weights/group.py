"""A process group of trainer ranks and every engine rank, for `DistributedChannel`. Nothing of
SGLang is imported."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from threading import Thread
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from milescli.backends.sglang.client.http import Orders, Reply
from milescli.core.errors import MilesError, WaitTimeout, WorkerDied
from milescli.core.units import format_duration
from milescli.weights.base import Slice

POLL_S = 0.002
"""Seconds between two checks whether a broadcast has left."""
LEAVE_TIMEOUT_S = 10.0
"""Time for an engine to confirm that it left: closing the group needs no reply."""


class WeightGroup:
    """Joins this process, trainer rank `rank` of the first `num_trainers`, with the engines; the
    ranks of engine i follow those of engine i - 1."""

    def __init__(
        self, orders: Orders, *, backend: str, host: str, rank: int = 0, num_trainers: int = 1
    ) -> None:
        """Form the group: rank 0 opens the store and tells the engines to join; other trainer ranks
        are told by it. Raises WorkerDied or WaitTimeout."""
        self._orders = orders
        self._rank, self._num_trainers = rank, num_trainers
        self.world_size = num_trainers + sum(engine.tp for engine in orders.engines)
        where: list[Any] = [None]
        if rank == 0:
            self.name = f"miles-weights-{uuid4().hex[:8]}"
            store = self._open_store(host)
            where = [(self.name, store.port)]
        if num_trainers > 1:
            dist.broadcast_object_list(where, src=0)
        self.name, port = where[0]
        joining: list[Reply] = []
        if rank == 0:
            joining = orders.begin_all(
                "/init_weights_update_group", self._invitations(host, port, backend)
            )
        else:
            store = dist.TCPStore(
                host, port, is_master=False, timeout=timedelta(seconds=orders.timeout_s)
            )
        self._store = c10d.PrefixStore(self.name, store)
        self._group = self._meet(backend, joining)

    def _open_store(self, host: str) -> dist.TCPStore:
        listener = socket.create_server((host, 0))
        return dist.TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._orders.timeout_s),
            master_listen_fd=listener.detach(),
        )

    def _invitations(self, host: str, port: int, backend: str) -> list[dict[str, object]]:
        bodies, offset = [], self._num_trainers
        for engine in self._orders.engines:
            bodies.append(
                {
                    "master_address": host,
                    "master_port": port,
                    "rank_offset": offset,
                    "world_size": self.world_size,
                    "group_name": self.name,
                    "backend": backend,
                }
            )
            offset += engine.tp
        return bodies

    def _meet(self, backend: str, joining: list[Reply]) -> dist.ProcessGroup:
        """Return the group, once every engine has joined. One that cannot is an error at once:
        joining itself would wait for it to the last."""
        forming: Future[dist.ProcessGroup] = Future()
        Thread(
            target=_resolve,
            args=(forming, lambda: self._join(backend)),
            name="weight-group",
            daemon=True,
        ).start()
        failure: MilesError | None = None
        if self._rank == 0:
            failure = self._failure_of(forming, joining)
        if self._num_trainers > 1:  # else the others would wait for who never comes
            box = [failure]
            dist.broadcast_object_list(box, src=0)
            failure = box[0]
        if failure is not None:
            raise failure
        return forming.result()

    def _failure_of(
        self, forming: Future[dist.ProcessGroup], joining: list[Reply]
    ) -> MilesError | None:
        done, _ = wait([forming, *joining], return_when=FIRST_EXCEPTION)
        try:
            self._orders.finish([future for future in joining if future in done])
        except MilesError as failure:
            return failure
        if error := forming.exception():
            return WorkerDied(
                "the process group for weights could not be formed",
                why=f"{type(error).__name__}: {error}",
                fix="read the engines' logs",
            )
        return None

    def _join(self, backend: str) -> dist.ProcessGroup:
        """Make the group beside the default one."""
        group, _ = c10d._new_process_group_helper(
            self.world_size,
            self._rank,
            [],
            c10d.Backend(backend),
            self._store,
            group_name=self.name,
            timeout=timedelta(seconds=self._orders.timeout_s),
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(self.world_size)}
        return group

    def send(self, flat: torch.Tensor, to: int) -> dist.Work:
        """Begin to send bytes to a rank of the group."""
        return self._group.send([flat], to, 0)

    def broadcast(self, flat: torch.Tensor, slices: list[Slice]) -> list[Reply]:
        """Load one bucket into all engines: they are told what follows, and it is broadcast as one
        run of bytes. Returns when it is sent; an engine replies when the tensors are in place.
        Raises WorkerDied or WaitTimeout."""
        body = {
            "names": [piece.name for piece in slices],
            "dtypes": [str(piece.dtype).removeprefix("torch.") for piece in slices],
            "shapes": [list(piece.shape) for piece in slices],
            "group_name": self.name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        loading = self._orders.begin_all(
            "/update_weights_from_distributed", [body] * len(self._orders.engines)
        )
        deadline = time.monotonic() + self._orders.timeout_s
        try:
            work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
            while not work.is_completed():
                # who replies before it was served has failed
                self._orders.finish([future for future in loading if future.done()])
                if time.monotonic() > deadline:
                    raise self._late(loading, size_bytes=flat.numel())
                time.sleep(POLL_S)
            work.wait()
        except RuntimeError as error:  # a peer left: its own order says which, and how
            self._orders.finish(loading)
            raise WorkerDied(
                "an engine left the process group for weights",
                why=f"{type(error).__name__}: {error}",
                fix="read the engines' logs",
            ) from error
        return loading

    def _late(self, loading: list[Reply], *, size_bytes: int) -> WaitTimeout:
        late = [
            engine.url
            for engine, future in zip(self._orders.engines, loading, strict=True)
            if not future.done()
        ]
        return WaitTimeout(
            f"{' and '.join(late)} did not receive a bucket of weights",
            why=f"the broadcast of {size_bytes} bytes did not finish within "
            f"{format_duration(self._orders.timeout_s)}",
            fix="read the engines' logs",
        )

    def close(self) -> None:
        """Leave the group on both sides; an engine that has died is skipped."""
        if self._rank == 0:
            bodies = [{"group_name": self.name}] * len(self._orders.engines)
            leaving = self._orders.begin_all(
                "/destroy_weights_update_group", bodies, timeout_s=LEAVE_TIMEOUT_S
            )
            wait(leaving, timeout=LEAVE_TIMEOUT_S)
        dist.destroy_process_group(self._group)


def _resolve(future: Future[Any], make: Callable[[], Any]) -> None:
    try:
        future.set_result(make())
    except Exception as error:  # whoever waits for the future raises it
        future.set_exception(error)
