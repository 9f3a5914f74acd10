"""Initialises Megatron's parallel state with bounded waits, and describes this trainer rank's place
as plain numbers and groups."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from milescli.core.errors import WaitTimeout
from milescli.plan.types import TrainerLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Holds this rank's coordinates on every axis, and its groups."""

    layout: TrainerLayout
    rank: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    ep_rank: int
    etp_rank: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    ep_group: dist.ProcessGroup
    etp_group: dist.ProcessGroup
    token_group: dist.ProcessGroup | None
    """Ranks of this stage that together hold all tokens of a step (data x context parallel); None
    if this rank holds all of them."""
    device: torch.device

    @property
    def is_first_stage(self) -> bool:
        """Return True if the rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Return True if the rank holds the output layer and computes losses."""
        return self.pp_rank == self.layout.pp - 1

    @property
    def reports_tokens(self) -> bool:
        """Return True on the one rank that reports figures among the ranks that process the same
        tokens."""
        return self.is_last_stage and self.tp_rank == 0

    @property
    def reporter(self) -> int:
        """Return the rank that first has a step's figures: the lowest of the last stage."""
        return self.layout.world_size // self.layout.pp * (self.layout.pp - 1)


def _open_store(
    master: tuple[str, int], *, rank: int, world_size: int, timeout: timedelta
) -> dist.TCPStore:
    """Return the store through which the ranks find each other. Rank 0 opens it on the address of
    `master` alone; by default torch listens on every interface."""
    if rank != 0:
        return dist.TCPStore(*master, world_size, is_master=False, timeout=timeout)
    listener = socket.create_server(master)
    return dist.TCPStore(
        *master, world_size, is_master=True, timeout=timeout, master_listen_fd=listener.detach()
    )


def bring_up(
    *,
    layout: TrainerLayout,
    rank: int,
    master: tuple[str, int],
    backend: str,
    device: torch.device,
    timeouts_s: tuple[float, float],
) -> Mesh:
    """Join the process group at `master` (address, port) and create Megatron's groups.
    `timeouts_s`: bounds of the wait for all ranks, and of every later collective. Raises
    WaitTimeout if not all ranks join."""
    from megatron.core import parallel_state, tensor_parallel

    start_s, step_s = timeouts_s
    try:
        store = _open_store(
            master, rank=rank, world_size=layout.world_size, timeout=timedelta(seconds=start_s)
        )
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=layout.world_size,
            timeout=timedelta(seconds=step_s),
        )
    except (dist.DistError, RuntimeError, OSError) as error:
        raise WaitTimeout(
            f"trainer rank {rank} could not connect to the other {layout.world_size - 1} ranks",
            why=f"no rendezvous at {master[0]}:{master[1]} within {start_s:.0f} s: {error}",
            fix="look in logs/latest for the rank that died first, or raise "
            "machine.start_timeout_s",
        ) from error
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=max(1, math.ceil(step_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    return _read(layout=layout, rank=rank, device=device)


def _read(*, layout: TrainerLayout, rank: int, device: torch.device) -> Mesh:
    from megatron.core import parallel_state as state

    return Mesh(
        layout=layout,
        rank=rank,
        tp_rank=state.get_tensor_model_parallel_rank(),
        pp_rank=state.get_pipeline_model_parallel_rank(),
        cp_rank=state.get_context_parallel_rank(),
        dp_rank=state.get_data_parallel_rank(),
        ep_rank=state.get_expert_model_parallel_rank(),
        etp_rank=state.get_expert_tensor_parallel_rank(),
        tp_group=state.get_tensor_model_parallel_group(),
        pp_group=state.get_pipeline_model_parallel_group(),
        cp_group=state.get_context_parallel_group(),
        ep_group=state.get_expert_model_parallel_group(),
        etp_group=state.get_expert_tensor_parallel_group(),
        token_group=state.get_data_parallel_group(with_context_parallel=True)
        if layout.dp * layout.cp > 1
        else None,
        device=device,
    )


def tear_down() -> None:
    """Destroy all groups. Safe to call twice."""
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
