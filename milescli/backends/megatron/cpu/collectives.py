"""Collectives of a group of one rank, without gloo. gloo's threads would copy the tensor onto
itself by OpenMP, and once two threads of a process have used OpenMP, its workers no longer wait
awake: each operation of the whole run would begin with a system call, which costs as much as the
operation. Installed by `cpu_compat` before Megatron is imported, as Megatron keeps some of them by
name."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def install() -> None:
    """Wrap the collectives of torch that trainer ranks and Megatron call, and those that send
    objects."""
    for name, copy in COPIES.items():
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, skip_for_single_rank(getattr(module, name), copy))


def skip_for_single_rank(
    collective: Callable[..., Any], copy: Callable[[Any, Any], None] | None
) -> Callable[..., Any]:
    """Return the collective, wrapped: for a group of one rank it calls `copy` on its first two
    arguments, or does nothing if `copy` is None. Asynchronous calls are unchanged, since they
    return a handle to wait for."""
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def collect(*arguments: Any, **options: Any) -> Any:
        given = signature.bind(*arguments, **options).arguments
        if given.get("async_op") or dist.get_world_size(given.get("group")) != 1:
            return collective(*arguments, **options)
        if copy is not None:
            copy(*itertools.islice(given.values(), 2))
        return None

    return collect


def _copy(output: torch.Tensor, input: torch.Tensor) -> None:
    if output.data_ptr() != input.data_ptr():
        output.copy_(input)


COPIES: dict[str, Callable[[Any, Any], None] | None] = {
    "all_gather": lambda outputs, input: _copy(outputs[0], input),
    "gather": lambda input, outputs: _copy(outputs[0], input),
    "scatter": lambda output, inputs: _copy(output, inputs[0]),
    "all_gather_into_tensor": _copy,
    "reduce_scatter_tensor": _copy,
    "all_reduce": None,
    "broadcast": None,
}
"""Name of a collective -> its effect for a single rank; None: the input is already the result."""
