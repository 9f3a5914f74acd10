"""Linear layers by oneDNN, with the gradients of both factors. Installed into Megatron's by
`cpu_compat`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from milescli.platform import onednn


def faster(megatron_linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Megatron's `linear_with_grad_accumulation_and_async_allreduce` that leaves to itself what
    `differentiable` does not do: sequence parallelism, types but float32, deferred gradients."""

    def linear(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[torch.Tensor] | None = None,
        wgrad_deferral_limit: int | None = 0,
        async_grad_allreduce: bool | None = None,
        tp_group: dist.ProcessGroup | None = None,
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
            grad_output_buffer,
            wgrad_deferral_limit,
            async_grad_allreduce,
            tp_group,
        )

    linear.warned = False
    return linear


def differentiable(
    x: torch.Tensor, weight: torch.Tensor, *, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """`onednn.product` with the gradients of both factors: x [..., i], weight [o, i] -> [..., o].
    `group`: tensor-parallel ranks over which the gradient of x is summed, or None."""
    rows = x.reshape(-1, x.shape[-1])
    # a view outside of the function: what comes out of one as a view may not be changed in place
    return _Differentiable.apply(rows, weight, group).view(*x.shape[:-1], len(weight))


class _Differentiable(torch.autograd.Function):
    """The same of x [T, i]."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
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
            grad_weight = _gradient(grad, x.contiguous(), weight)
        return grad_x, grad_weight, None


def _gradient(grad: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, o] and [T, i] -> grad.T @ rows [o, i]: that of a convolution over an image of one row, T
    wide, channels innermost, which is the matrix as it lies; of a product oneDNN has none here."""
    _, grad_weight, _ = torch.ops.aten.convolution_backward(
        _image(grad),
        _image(rows),
        weight[:, :, None, None],
        None,
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
        [False, True, False],
    )
    return grad_weight.reshape(weight.shape)


def _image(rows: torch.Tensor) -> torch.Tensor:
    """[T, channels] -> [1, channels, 1, T], the same memory."""
    return rows[None, None].permute(0, 3, 1, 2)
