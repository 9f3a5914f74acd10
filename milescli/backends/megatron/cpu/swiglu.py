"""SwiGLU on a CPU, nothing kept but the input: in a compiled kernel, or block by block of rows, one
pass over the memory each way. Installed into Megatron's MLP by `cpu_compat`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from milescli.backends.megatron.cpu.blocks import row_blocks
from milescli.platform import kernels


def is_plain(config: TransformerConfig) -> bool:
    """Whether the MLPs of a model are silu(gate) * up in float32, without a cap or an offset."""
    return (
        config.activation_func is F.silu
        and config.gated_linear_unit
        and config.activation_func_clamp_value is None
        and config.glu_linear_offset == 0.0
        and config.params_dtype is torch.float32
    )


def swiglu(
    x: torch.Tensor, bias: torch.Tensor | None, fp8_input_store: bool = False, offload: bool = False
) -> torch.Tensor:
    """[..., 2 F] -> [..., F]; signature of Megatron's `bias_swiglu_impl`."""
    return SwiGlu.apply(x if bias is None else x + bias)


def weighted_swiglu(
    x: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor, fp8_input_store: bool = False
) -> torch.Tensor:
    """The same times `weights` [..., 1], those of the experts; signature of Megatron's
    `weighted_bias_swiglu_impl`."""
    return swiglu(x, bias) * weights.to(x.dtype)


class SwiGlu(torch.autograd.Function):
    """silu(first half) * second half."""

    @staticmethod
    def forward(ctx, x):
        ctx.compiled = kernels.suit(x)
        if ctx.compiled:
            ctx.save_for_backward(x)
            return kernels.swiglu(x)
        rows = x.reshape(-1, x.shape[-1])
        gate, up = rows.chunk(2, dim=-1)
        out = torch.empty((*x.shape[:-1], gate.shape[1]), dtype=x.dtype)
        out_rows = out.view(gate.shape)
        for block in row_blocks(*gate.shape):
            torch.ops.aten.silu.out(gate[block], out=out_rows[block]).mul_(up[block])
        ctx.save_for_backward(rows)
        return out

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        if ctx.compiled:
            return kernels.swiglu_backward(grad, rows)
        gate, up = rows.chunk(2, dim=-1)
        grad_rows = grad.reshape(gate.shape)
        out = torch.empty_like(rows)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        for block in row_blocks(*gate.shape):
            torch.mul(grad_rows[block], F.silu(gate[block]), out=grad_up[block])
            torch.ops.aten.silu_backward.grad_input(
                grad_rows[block] * up[block], gate[block], grad_input=grad_gate[block]
            )
        return out.view(*grad.shape[:-1], out.shape[1])
