"""Writing the sharded part of a `torch_dist` checkpoint from a thread. Megatron's own writer forks
processes and keeps a manager process alive, which would outlive a killed trainer rank; the files
are the same."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from milescli.core.errors import CheckpointError, WaitTimeout


class BackgroundSave(AsyncSaveShardedStrategy):
    """One save: planned together by all ranks, written by each from a thread, completed together by
    `finalize_fns`."""

    def __init__(self, *, timeout_s: float) -> None:
        super().__init__("torch_dist", 1)
        self._timeout_s = timeout_s
        self._results: list[WriteResult] = []
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._started = 0.0
        self._folder = Path()

    def can_handle_sharded_objects(self) -> bool:
        """Megatron asks: yes, as bytes."""
        return True

    def async_save(self, sharded_state_dict, checkpoint_dir) -> AsyncRequest:
        """Called by Megatron. Copies every tensor to the host, agrees on the plan, and starts the
        thread."""
        self._folder = Path(checkpoint_dir)
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
        return AsyncRequest(None, (), [lambda: self._complete(writer, metadata)])

    def _write(self, writer: FileSystemWriter, plan, planner: MCoreSavePlanner) -> None:
        try:
            self._results = writer.write_data(plan, planner).wait()
        except BaseException as error:  # kept, and raised by `_complete` on every rank
            self._failure = error

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

    def _complete(self, writer: FileSystemWriter, metadata: Metadata | None) -> None:
        """Rank 0 writes what was written where; all ranks learn of a failure on any."""
        gathered: list[object] = [None] * dist.get_world_size()
        mine = (
            self._results
            if self._failure is None
            else f"{type(self._failure).__name__}: {self._failure}"
        )
        dist.all_gather_object(gathered, mine)
        failures = [(rank, text) for rank, text in enumerate(gathered) if isinstance(text, str)]
        if failures:
            rank, text = failures[0]
            raise CheckpointError(
                f"the checkpoint `{self._folder}` was not written",
                why=f"trainer rank {rank}: {text}",
                fix="make room on the disk (`df -h`), then `miles resume`",
            ) from self._failure
        if dist.get_rank() == 0:
            assert metadata is not None
            writer.finish(metadata, gathered)


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
