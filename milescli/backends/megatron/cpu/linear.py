"""Linear layers by oneDNN, with the gradients of both factors. Installed into Megatron's by
`cpu_compat`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from milescli.platform import onednn


def faster(megatron_linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return Megatron's `linear_with_grad_accumulation_and_async_allreduce` or
    `linear_with_frozen_weight`, with `differentiable` in place of the original except for sequence
    parallelism, types other than float32, and deferred gradients."""

    def linear(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        *,
        grad_output_buffer: list[torch.Tensor] | None = None,
        tp_group: dist.ProcessGroup | None = None,
        **more: Any,
    ) -> torch.Tensor:
        known = not (sequence_parallel or gradient_accumulation_fusion or grad_output_buffer)
        if known and onednn.computes(input, weight):
            out = differentiable(input, weight, group=tp_group if allreduce_dgrad else None)
            return out if bias is None else out + bias
        return megatron_linear(
            input,
            weight,
            bias,
            gradient_accumulation_fusion,
            allreduce_dgrad,
            sequence_parallel,
            grad_output_buffer=grad_output_buffer,
            tp_group=tp_group,
            **more,
        )

    linear.warned = False
    return linear


def differentiable(
    x: torch.Tensor, weight: torch.Tensor, *, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return `onednn.product` with the gradients of both factors: x [..., i], weight [o, i] ->
    [..., o]. The gradient of x is summed over the tensor-parallel ranks of `group`, if given."""
    rows = x.reshape(-1, x.shape[-1])
    # a view outside of the function: what comes out of one as a view may not be changed in place
    return _Differentiable.apply(rows, weight, group).view(*x.shape[:-1], len(weight))


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `F.linear(x, weight)`, computed by oneDNN if that is faster."""
    return differentiable(x, weight) if onednn.computes(x, weight) else F.linear(x, weight)


class _Differentiable(torch.autograd.Function):
    """Implements `differentiable` for x [T, i]."""

    @staticmethod
    def forward(ctx, x, weight, group):
        # of a frozen weight there is no gradient that x is needed for
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.group = group
        return onednn.product(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = onednn.product(grad, weight.t())
            if ctx.group is not None:
                dist.all_reduce(grad_x, group=ctx.group)
        if ctx.needs_input_grad[1]:
            grad_weight = onednn.weight_gradient(grad, x)
        return grad_x, grad_weight, None
