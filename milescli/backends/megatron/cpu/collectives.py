"""Collectives of a group of one rank, without gloo. Its threads would copy the tensor onto itself
by OpenMP, and once two threads of a process have used that, its workers no longer wait awake: each
operation of the whole run would begin with a system call, which costs as much as the operation.
Installed into Megatron's gradient buffers by `cpu_compat`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def skip_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A reduce-scatter or all-gather (output, input, group=...) that is a copy, or nothing where
    both are the same memory, in a group of one."""

    def collect(
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        group: dist.ProcessGroup,
        async_op: bool = False,
        **options: Any,
    ) -> Any:
        if async_op or group.size() > 1:
            return collective(output, input, group=group, async_op=async_op, **options)
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        return None

    return collect
