"""Matrix products of linear layers by oneDNN, which has kernels for the vector units of every
vendor: MKL, torch's own choice for float32, takes narrower ones on other vendors' processors and is
less than half as fast there. Installed into Megatron's linear layers by `cpu_compat`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

_FEW_ROWS = 16
"""With fewer, the product is over before oneDNN has looked its kernel up."""


def faster(megatron_linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Megatron's `linear_with_grad_accumulation_and_async_allreduce` that leaves to itself what
    `Linear` does not do: sequence parallelism, other types than float32, deferred gradients."""

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
        if known and _computes(input, weight):
            out = Linear.apply(input, weight, tp_group if allreduce_dgrad else None)
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


def _computes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    is_float = x.dtype is weight.dtype is torch.float32
    return (
        is_float and x.numel() >= _FEW_ROWS * x.shape[-1] and torch.backends.mkldnn.is_available()
    )


class Linear(torch.autograd.Function):
    """x [..., i], weight [o, i] -> x @ weight.T [..., o]. `group`: tensor-parallel ranks over which
    the gradient of x is summed, or None."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        out = _product(x.reshape(-1, x.shape[-1]), weight)
        # the same memory as a tensor of its own: Megatron adds to some outputs in place, which
        # autograd forbids for a view that was made in here
        return x.new_empty(0).set_(out.untyped_storage(), 0, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1]).contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(rows, weight.t()).view(x.shape)
            if ctx.group is not None:
                dist.all_reduce(grad_x, group=ctx.group)
        if ctx.needs_input_grad[1]:
            grad_weight = _gradient(rows, x.reshape(-1, x.shape[-1]).contiguous(), weight)
        return grad_x, grad_weight, None


def _product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, i] and [o, i] -> [T, o]: a convolution over an image of one row, T wide, i channels deep
    and channels innermost, which is the matrix as it lies."""
    image = torch.ops.aten.mkldnn_convolution(
        _image(rows.contiguous()), weight[:, :, None, None], None, [0, 0], [1, 1], [1, 1], 1
    )
    return image[0, :, 0].t().contiguous()  # no copy: channels are innermost here too


def _gradient(grad: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, o] and [T, i] -> [o, i], the gradient of the same convolution."""
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
