"""Writing the sharded part of a `torch_dist` checkpoint from a thread. Megatron's own writer forks
processes and keeps a manager process alive, which would outlive a killed trainer rank; the files
are the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
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
from torch.distributed.checkpoint.storage import WriteResult

from milescli.checkpoint.store import not_written
from milescli.core.digest import sha256_of
from milescli.core.errors import WaitTimeout

_WRITING_FAILED = (OSError, RuntimeError)
"""A full disk is a RuntimeError in torch's zip files."""


class _CommonPart(TorchCommonSaveStrategy):
    """What is no tensor, which rank 0 alone writes. Where it cannot, it says so when all ranks
    speak, as the others are already waiting for it in a collective."""

    failure: BaseException | None = None

    def save_common(self, common_state_dict, checkpoint_dir) -> None:
        """Called by Megatron on every rank."""
        self.failure = None
        try:
            super().save_common(common_state_dict, checkpoint_dir)
        except _WRITING_FAILED as error:
            self.failure = error


_COMMON_PART = _CommonPart("torch", 1)


class BackgroundSave(AsyncSaveShardedStrategy):
    """One save: planned together by all ranks, written and hashed by each from a thread, completed
    together by `complete`. No rank goes on while another has failed: all raise alike."""

    def __init__(self, *, timeout_s: float) -> None:
        super().__init__("torch_dist", 1)
        self._timeout_s = timeout_s
        self._results: list[WriteResult] = []
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._started = 0.0
        self._folder = Path()
        self._sha256: dict[str, str] = {}
        self._finish: Callable[[list[object]], None] = lambda results: None
        register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, _COMMON_PART)

    def can_handle_sharded_objects(self) -> bool:
        """Megatron asks: yes, as bytes."""
        return True

    def async_save(self, sharded_state_dict, checkpoint_dir) -> AsyncRequest:
        """Called by Megatron. Copies every tensor to the host, agrees on the plan, and starts the
        thread."""
        self._folder, self._failure = Path(checkpoint_dir), _COMMON_PART.failure
        for item in nested_values(sharded_state_dict):
            if isinstance(item, ShardedTensor):
                item.data = item.data.detach().to("cpu", copy=True)
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        state = mcore_to_pyt_state_dict(flat, False)
        rank = dist.get_rank()
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        writer = FileSystemWriter(
            self._folder, single_file_per_rank=True, sync_files=True, thread_count=1
        )
        planner.set_up_planner(state, is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plan, metadata = _agree(planner, writer)
        plan = planner.finish_plan(plan)
        self._started = time.monotonic()
        self._thread = threading.Thread(
            target=self._write, args=(writer, plan, planner), name="checkpoint-writer", daemon=True
        )
        self._thread.start()
        self._finish = lambda results: writer.finish(metadata, results)
        return AsyncRequest(None, (), [])

    def _write(self, writer: FileSystemWriter, plan, planner: MCoreSavePlanner) -> None:
        try:
            self._results = writer.write_data(plan, planner).wait()
            # just written, so that they are read from memory
            names = {result.storage_data.relative_path for result in self._results}
            self._sha256 = {name: sha256_of(self._folder / name) for name in sorted(names)}
        except BaseException as error:  # kept, and raised by `complete` on every rank
            self._failure = error

    @property
    def is_written(self) -> bool:
        """Whether this rank's files are on disk, or never will be."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self) -> None:
        """Until this rank's files are on disk. Raises WaitTimeout."""
        assert self._thread is not None, "nothing was saved"
        self._thread.join(timeout=self._timeout_s)
        if self._thread.is_alive():
            raise WaitTimeout(
                f"trainer rank {dist.get_rank()} is still writing the checkpoint `{self._folder}`",
                why=f"it began {time.monotonic() - self._started:.0f} s ago; the bound is "
                f"{self._timeout_s:.0f} s",
                fix=[
                    "check the disk: is it full, or a network file system that hangs?",
                    "raise machine.step_timeout_s",
                ],
            )

    def complete(self) -> dict[str, str]:
        """Rank 0 writes what was written where; all ranks learn of a failure on any. Returns the
        SHA-256 of every file with tensors, by its name in the folder. Raises CheckpointError."""
        gathered: list[object] = [None] * dist.get_world_size()
        failure = self._failure
        mine = (self._results, self._sha256) if failure is None else _told(failure)
        dist.all_gather_object(gathered, mine)
        self._raise_together(gathered, failure)
        if dist.get_rank() == 0:
            try:
                self._finish([results for results, _ in gathered])
                save_config(CheckpointingConfig(self.backend, self.version), str(self._folder))
            except _WRITING_FAILED as error:
                failure = error
        told = [None if failure is None else _told(failure)]
        dist.broadcast_object_list(told, src=0)
        self._raise_together(told, failure)
        return {name: digest for _, sha256 in gathered for name, digest in sha256.items()}

    def _raise_together(self, told: list[object], own: BaseException | None) -> None:
        """`told` [rank]: a text for a rank that failed."""
        for rank, text in enumerate(told):
            if isinstance(text, str):
                raise not_written(self._folder, f"trainer rank {rank}: {text}") from own


def _told(error: BaseException) -> str:
    """Its first line; torch says of a full disk that a position is unexpected, and the system's own
    word is the error that this one follows."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    said = cause or error
    return f"{type(said).__name__}: {str(said).partition(chr(10))[0]}"


def _agree(planner: MCoreSavePlanner, writer: FileSystemWriter):
    """(this rank's plan, metadata on rank 0): every rank says what it has, rank 0 names the
    files."""
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
