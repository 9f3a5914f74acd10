"""Memory that Mooncake's transfer engine reads in other processes, over RDMA: the ends of it in
trainer ranks, which offer memory, and in engine ranks, which read it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from milescli.core.errors import MachineError
from milescli.weights.remote import ReceiveBuffer, RemoteMemory

DEVICES = Path("/sys/class/infiniband")
"""Where Linux lists RDMA devices."""
_FORCE_TCP = "MC_FORCE_TCP"
"""Mooncake's own variable, by which it uses TCP where there is no RDMA."""
_PREFIX = "rdma:"


class Endpoint:
    """Offers memory of this process, and reads that of others."""

    def __init__(self, engine: Any, host: str) -> None:
        """Take an initialised transfer engine of Mooncake, and the address of this host."""
        self._engine = engine
        self.session = f"{host}:{engine.get_rpc_port()}"
        """Name by which other processes reach it."""

    def register(self, memory: torch.Tensor) -> None:
        """Let others read `memory` ([bytes] uint8, of the host). Raises MachineError."""
        if self._engine.register_memory(memory.data_ptr(), memory.nbytes):
            raise MachineError(
                "memory for weights cannot be registered for RDMA",
                why=f"Mooncake refused {memory.nbytes:,} bytes; a process may lock too few",
                fix="ulimit -l unlimited   # in the shell that starts miles, or for Ray's user",
            )

    def forget(self, memory: torch.Tensor) -> None:
        """Let nobody read it any more."""
        self._engine.unregister_memory(memory.data_ptr())

    def memory_for(self, size_bytes: int) -> torch.Tensor:
        """Return memory into which it reads."""
        memory = torch.empty(size_bytes, dtype=torch.uint8)
        self.register(memory)
        return memory

    def read(self, memory: str, runs: Sequence[tuple[int, int, int]], into: torch.Tensor) -> None:
        """Read as `weights.remote.Reader` has it; `memory` comes from `handle_of`. Raises OSError
        where the other process does not answer, or does not offer it."""
        session, address = json.loads(memory)
        begin = into.data_ptr()
        failed = self._engine.batch_transfer_sync_read(
            session,
            [begin + place for _, place, _ in runs],
            [address + first for first, _, _ in runs],
            [size for _, _, size in runs],
        )
        if failed:
            raise OSError(f"Mooncake cannot read the memory of {session} (status {failed})")


def handle_of(endpoint: Endpoint, memory: torch.Tensor) -> str:
    """Return what an engine rank needs to read a trainer rank's memory."""
    return _PREFIX + json.dumps([endpoint.session, memory.data_ptr()])


def is_remote(handle: str) -> bool:
    """Return True for what `handle_of` makes."""
    return handle.startswith(_PREFIX)


_receive_buffer: list[ReceiveBuffer] = []
"""Buffer into which this engine rank reads; created at the first order."""


def remote_memories(tensors: Sequence[Any], handles: Sequence[str]) -> list[RemoteMemory]:
    """Return the memory of these handles, to be read until the next call. `tensors`: of the order,
    whose boxes bound what is read. Raises MachineError where this node cannot."""
    memories = [handle.removeprefix(_PREFIX) for handle in handles]
    if not _receive_buffer:
        session, _ = json.loads(memories[0])
        _receive_buffer.append(ReceiveBuffer(endpoint(session.rpartition(":")[0])))
    size_bytes = sum(end - first + 16 for *_, boxes in tensors for _, first, end, *_ in boxes)
    _receive_buffer[0].begin(size_bytes)
    return [RemoteMemory(memory, _receive_buffer[0]) for memory in memories]


_endpoint: list[Endpoint] = []


def endpoint(peer: str) -> Endpoint:
    """Return this process's end, made at the first call. `peer`: a host that it talks to. Raises
    MachineError where Mooncake is not there, or the node has no RDMA device."""
    if not _endpoint:
        _endpoint.append(_made(_address_towards(peer)))
    return _endpoint[0]


def require_node() -> Any:
    """Return Mooncake's TransferEngine. Raises MachineError where it cannot be imported, or the
    node has no RDMA device and MC_FORCE_TCP is not set."""
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise MachineError(
            "weights cannot be sent over RDMA",
            why=f"Mooncake's transfer engine cannot be imported: {error}",
            fix=["pip install 'miles-cli[rdma]'", "apt-get install libibverbs1   # as root"],
        ) from None
    if not os.environ.get(_FORCE_TCP) and not (DEVICES.is_dir() and any(DEVICES.iterdir())):
        raise MachineError(
            "weights cannot be sent over RDMA",
            why=f"node {socket.gethostname()} has no RDMA device in {DEVICES}",
            fix=[
                "--set weights.channel=distributed",
                f"export {_FORCE_TCP}=1   # Mooncake over TCP, to try it",
            ],
        )
    return TransferEngine


def _made(host: str) -> Endpoint:
    engine = require_node()()
    protocol = "tcp" if os.environ.get(_FORCE_TCP) else "rdma"
    if engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
        raise MachineError(
            "weights cannot be sent over RDMA",
            why=f"Mooncake did not start on {host} with protocol {protocol}",
            fix="--set weights.channel=distributed",
        )
    return Endpoint(engine, host)


def _address_towards(peer: str) -> str:
    """Return this host's address on the peer's network; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return probe.getsockname()[0]
