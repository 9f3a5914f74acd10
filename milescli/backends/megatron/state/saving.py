"""Writes the sharded part of a `torch_dist` checkpoint from a thread, directly from the memory in
which the model is trained: call `release_state` before you change it. Megatron's own writer forks
processes and keeps a manager process alive, which would outlive a killed trainer rank, and torch's
writer holds a copy of every tensor until the last one is written. The files are the same."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain, count
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    StrategyAction,
    register_default_strategy,
)
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from milescli.checkpoint.files import as_bytes, crc32_of
from milescli.checkpoint.store import save_failed
from milescli.checkpoint.torch_dist.framing import make_framing
from milescli.core.errors import WaitTimeout

_WRITING_FAILED = (OSError, RuntimeError)
"""torch's zip files raise RuntimeError if the disk is full."""
_reading: list[BackgroundSave] = []
"""Saves of this process that still read the memory in which a model is trained."""
_changes = count()
_last = [next(_changes)]


def release_state() -> None:
    """Wait until no save reads weights, optimizer states or buffers of this rank; called before
    they change. Raises WaitTimeout."""
    for save in list(_reading):
        save.wait_until_read()
    _last[0] = next(_changes)


def last_change() -> int:
    """Return a number that changes with each `release_state`: values computed from the weights at
    another number are outdated."""
    return _last[0]


class _CommonPart(TorchCommonSaveStrategy):
    """Writes everything that is not a tensor, on rank 0 alone. A failure is stored and reported
    when all ranks report, because the other ranks already wait for rank 0 in a collective."""

    failure: BaseException | None = None

    def save_common(self, common_state_dict, checkpoint_dir) -> None:
        """Write the common part, and store any failure; Megatron calls this on every rank."""
        self.failure = None
        try:
            super().save_common(common_state_dict, checkpoint_dir)
        except _WRITING_FAILED as error:
            self.failure = error


_COMMON_PART = _CommonPart("torch", 1)


class BackgroundSave(AsyncSaveShardedStrategy):
    """Runs one save: all ranks plan it together, each writes and hashes its part from a thread, and
    `complete` completes it together. If one rank fails, all raise the same error."""

    def __init__(self, *, timeout_s: float, copies: bool) -> None:
        """With `copies`, copy device memory to the host before writing."""
        super().__init__("torch_dist", 1)
        self._timeout_s, self._copies = timeout_s, copies
        self._results: list[WriteResult] = []
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._read = threading.Event()
        self._started = 0.0
        self._folder = Path()
        self._sha256: dict[str, str] = {}
        self._finish: Callable[[list[object]], None] = lambda results: None
        register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, _COMMON_PART)

    def can_handle_sharded_objects(self) -> bool:
        """Return True: objects are saved as bytes. Called by Megatron."""
        return True

    def async_save(self, sharded_state_dict, checkpoint_dir) -> AsyncRequest:
        """Agree on the plan and start the thread; Megatron calls this."""
        self._folder, self._failure = Path(checkpoint_dir), _COMMON_PART.failure
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        tensors = [x for x in chain.from_iterable(flat.values()) if isinstance(x, ShardedTensor)]
        copied = [each for each in tensors if self._copies and not each.data.is_cpu]
        for each in copied:
            each.data = each.data.detach().to("cpu")
        state = mcore_to_pyt_state_dict(flat, False)
        rank = dist.get_rank()
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        writer = FileSystemWriter(self._folder, single_file_per_rank=True)
        planner.set_up_planner(state, is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plan, metadata = _exchange_plans(planner, writer)
        plan = planner.finish_plan(plan)
        self._started = time.monotonic()
        self._thread = threading.Thread(
            target=self._write, args=(plan, planner), name="checkpoint-writer", daemon=True
        )
        if len(copied) < len(tensors):  # the others are read where they are
            _reading.append(self)
        self._thread.start()
        self._finish = lambda results: writer.finish(metadata, results)
        return AsyncRequest(None, (), [])

    def _write(self, plan, planner: MCoreSavePlanner) -> None:
        name, digest = f"{plan.storage_data.prefix}0.distcp", hashlib.sha256()
        try:
            with (self._folder / name).open("wb") as file:
                for item in plan.items:
                    begin = file.tell()
                    for part in _framed(item, planner.resolve_data(item)):
                        file.write(part)
                        digest.update(part)
                    self._results.append(
                        WriteResult(
                            index=item.index,
                            size_in_bytes=file.tell() - begin,
                            storage_data=_StorageInfo(name, begin, file.tell() - begin),
                        )
                    )
                file.flush()
                self._is_read()
                os.fsync(file.fileno())
            self._sha256 = {name: digest.hexdigest()}
        except BaseException as error:  # kept, and raised by `complete` on every rank
            self._failure = error
        finally:
            self._is_read()

    def _is_read(self) -> None:
        self._read.set()
        if self in _reading:
            _reading.remove(self)

    def wait_until_read(self) -> None:
        """Wait until this rank has passed all its data to the operating system, though it may not
        be on disk yet. Raises WaitTimeout."""
        if not self._read.wait(timeout=self._timeout_s):
            raise self._timeout_error()

    @property
    def is_written(self) -> bool:
        """Return True if this rank's files are on disk, or writing them has failed."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until this rank's files are on disk. Raises WaitTimeout."""
        assert self._thread is not None, "nothing was saved"
        self._thread.join(timeout=self._timeout_s)
        if self._thread.is_alive():
            raise self._timeout_error()

    def _timeout_error(self) -> WaitTimeout:
        return WaitTimeout(
            f"trainer rank {dist.get_rank()} is still writing the checkpoint `{self._folder}`",
            why=f"it started {time.monotonic() - self._started:.0f} s ago; the limit is "
            f"{self._timeout_s:.0f} s",
            fix=[
                "check the disk: is it full, or is a network file system hanging?",
                "raise machine.step_timeout_s",
            ],
        )

    def complete(self) -> dict[str, str]:
        """Complete the save on all ranks: rank 0 writes the index of what was written, and every
        rank learns of a failure on any. Return the SHA-256 of every file with tensors, by its name
        in the folder. Raises CheckpointError."""
        gathered: list[object] = [None] * dist.get_world_size()
        failure = self._failure
        mine = (self._results, self._sha256) if failure is None else _first_line(failure)
        dist.all_gather_object(gathered, mine)
        self._raise_together(gathered, failure)
        if dist.get_rank() == 0:
            try:
                self._finish([results for results, _ in gathered])
                save_config(CheckpointingConfig(self.backend, self.version), str(self._folder))
            except _WRITING_FAILED as error:
                failure = error
        failures = [None if failure is None else _first_line(failure)]
        dist.broadcast_object_list(failures, src=0)
        self._raise_together(failures, failure)
        return {name: digest for _, sha256 in gathered for name, digest in sha256.items()}

    def _raise_together(self, failures: list[object], own: BaseException | None) -> None:
        """Raise the first failure on every rank. `failures` [rank]: a text if that rank failed."""
        for rank, text in enumerate(failures):
            if isinstance(text, str):
                raise save_failed(self._folder, f"trainer rank {rank}: {text}") from own


def _framed(item: WriteItem, data) -> Iterator[memoryview | bytes]:
    """Yield the bytes of an item: unchanged, or a tensor in torch.save's framing. A tensor on an
    accelerator is copied to host memory while it is written."""
    if item.type is WriteItemType.BYTE_IO:
        yield data.getbuffer()
        return
    tensor: torch.Tensor = data.detach().cpu().contiguous()
    bytes_ = as_bytes(tensor)
    framing = make_framing(tensor.dtype, [tuple(tensor.shape)], crc32=crc32_of(bytes_))
    yield framing.head
    yield memoryview(bytes_.numpy())
    yield framing.tail


def _first_line(error: BaseException) -> str:
    """Return the first line of the underlying OSError, if there is one: for a full disk torch only
    reports an unexpected position."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    cause_or_error = cause or error
    return f"{type(cause_or_error).__name__}: {str(cause_or_error).partition(chr(10))[0]}"


def _exchange_plans(planner: MCoreSavePlanner, writer: FileSystemWriter):
    """Return (this rank's plan, metadata on rank 0): every rank sends its plan, and rank 0 names
    the files."""
    rank, world = dist.get_rank(), dist.get_world_size()
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans: list[object] | None = [None] * world if rank == 0 else None
    dist.gather_object(local, plans, dst=0)
    metadata, own_plan = None, [None]
    if rank == 0:
        agreed, metadata = planner.create_global_plan(plans)
        dist.scatter_object_list(own_plan, writer.prepare_global_plan(agreed), src=0)
    else:
        dist.scatter_object_list(own_plan, None, src=0)
    return own_plan[0], metadata
