"""Two channels for engines that share no memory with the trainer and read the weights when they
need them: files in a folder that all nodes reach, and memory that Mooncake reads over RDMA. They
run inside trainer ranks, and use the orders and pieces of the other channels."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from milescli.backends.sglang.inside.remote import Endpoint, endpoint, handle_of, require_node
from milescli.backends.sglang.weights.channels import TensorChannel, rank_here
from milescli.backends.sglang.weights.shared_tensor import SharedBuffer, write_file
from milescli.core.errors import DISK_FULL, MachineError
from milescli.core.types import EngineAddress
from milescli.core.units import format_bytes
from milescli.weights.base import Bucket, write_flat
from milescli.weights.shards import Part, Shard, whole

_HOST = torch.device("cpu")


class _ReadChannel(TensorChannel):
    """Engine ranks read pieces from every trainer rank, and whole tensors from rank 0."""

    def open(self, engines: list[EngineAddress]) -> None:
        """Open the channel and prepare this node. Raises MachineError on all ranks if one fails."""
        super().open(engines)
        on_all_ranks(self._prepare)

    def _prepare(self) -> None:
        """Create the place for buckets. Raises MachineError."""
        raise NotImplementedError

    def _readers_of(
        self, engines: list[EngineAddress], num_ranks: int
    ) -> list[list[tuple[int, int]]]:
        everyone = [
            (number, rank) for number, engine in enumerate(engines) for rank in range(engine.tp)
        ]
        return [everyone, *([] for _ in range(num_ranks - 1))]

    def _memory_key(self) -> object:
        return None


def on_all_ranks(prepare: Callable[[], None]) -> None:
    """Run `prepare`. Collective: raises MachineError on all ranks if it does on one."""
    failures: list[MachineError | None] = [None]
    try:
        prepare()
    except MachineError as error:
        failures = [error]
    if dist.is_initialized() and dist.get_world_size() > 1:
        own, failures = failures[0], [None] * dist.get_world_size()
        dist.all_gather_object(failures, own)
    for failure in failures:
        if failure is not None:
            raise failure


class DiskChannel(_ReadChannel):
    """Sends through files, at most two per trainer rank at a time. Each has a new name, so that no
    node has an older one in its cache; engines map them and read their part."""

    place: str | None = None
    """Folder that trainer ranks and engines reach under the same path; a run uses its own."""

    @property
    def _folder(self) -> Path:
        assert self.place is not None, "a disk channel needs a folder"
        return Path(self.place).absolute()

    def _prepare(self) -> None:
        """Create the folder, and remove files that this rank left there when it was killed."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in self._folder.glob(f"{prefix()}*"):
                left.unlink(missing_ok=True)
        except OSError as error:
            raise _write_error(self._folder, error) from None

    def _new_buffer(self, size_bytes: int, device: torch.device) -> SharedBuffer:
        return _FileBuffer(size_bytes, made_for=device, folder=self._folder)


class _FileBuffer(SharedBuffer):
    """Holds a bucket in a file of its own."""

    def __init__(self, size_bytes: int, *, made_for: torch.device, folder: Path) -> None:
        super().__init__(size_bytes, _HOST)
        self.made_for, self._folder = made_for, folder

    def write(self, bucket: Bucket) -> None:
        """Write a new file. Raises MachineError if the folder is full, or does not exist."""
        self.free()
        self._file = self._folder / f"{prefix()}{secrets.token_hex(8)}"
        try:
            write_file(bucket, self._file)
        except OSError as error:
            self.free()
            raise _write_error(self._folder, error, size_bytes=self.size_bytes) from None


def prefix() -> str:
    """Return how the names of this rank's files begin."""
    return f"rank{rank_here()}-"


def _write_error(folder: Path, error: OSError, *, size_bytes: int = 0) -> MachineError:
    is_full = error.errno in DISK_FULL
    why = str(error.strerror)
    if size_bytes:
        why += f": a file needs {format_bytes(size_bytes)}, and each trainer rank writes two"
    return MachineError(
        f"weights for the engines cannot be written to {folder}",
        why=why,
        fix=[
            *["--set weights.bucket_mib=16"] * is_full,
            f"df -h {folder}   # free some disk space" if is_full else f"ls -ld {folder}",
        ],
    )


class RdmaChannel(_ReadChannel):
    """Sends through Mooncake: each engine rank reads its pieces from host memory that the trainer
    ranks registered. A whole tensor is one piece, of rank 0."""

    require_node = staticmethod(require_node)

    def __init__(self, **settings: Any) -> None:
        """Accept the settings of every channel."""
        super().__init__(**settings)
        self._endpoint: Endpoint | None = None

    def _prepare(self) -> None:
        self._endpoint = endpoint(self._host)

    def _flatten(self, bucket: Any, index: int) -> Any:
        if bucket and not isinstance(bucket[0], Shard):
            bucket = [_piece(name, tensor) for name, tensor in bucket]
        return super()._flatten(bucket, index)

    def _new_buffer(self, size_bytes: int, device: torch.device) -> SharedBuffer:
        assert self._endpoint is not None, "send before open"
        return _RegisteredBuffer(size_bytes, made_for=device, endpoint=self._endpoint)


def _piece(name: str, tensor: torch.Tensor) -> Shard:
    shape = tuple(tensor.shape)
    part = Part(name=name, shape=shape, dtype=tensor.dtype, box=whole(shape), owners=(0,))
    return Shard(part=part, senders=(0,), tensor=tensor)


class _RegisteredBuffer(SharedBuffer):
    """Holds a bucket in host memory that engines read over RDMA."""

    def __init__(self, size_bytes: int, *, made_for: torch.device, endpoint: Endpoint) -> None:
        super().__init__(size_bytes, _HOST)
        self.made_for, self._endpoint = made_for, endpoint
        self.flat = torch.empty(size_bytes, dtype=torch.uint8)
        endpoint.register(self.flat)

    def write(self, bucket: Bucket) -> None:
        """Copy the bucket; if it is on a device, wait until the copy is complete."""
        write_flat(bucket, self.flat)

    def handle(self, used: int) -> str:
        """Return the handle by which an engine rank reads the buffer."""
        return handle_of(self._endpoint, self.flat)

    def free(self) -> None:
        """Unregister the memory, so that no engine reads it any more."""
        self._endpoint.forget(self.flat)
