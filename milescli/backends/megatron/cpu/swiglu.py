"""SwiGLU on a CPU in a compiled kernel that keeps nothing but the input. Installed into Megatron's
MLP by `cpu_compat`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from milescli.platform import cpu_kernels, exact


def is_plain(config: TransformerConfig) -> bool:
    """Return True if the MLPs of a model compute silu(gate) * up without a cap or an offset, in
    float32; under `exact` this includes MLPs of a bfloat16 model."""
    return (
        config.activation_func is F.silu
        and config.gated_linear_unit
        and config.activation_func_clamp_value is None
        and config.glu_linear_offset == 0.0
        and (config.params_dtype is torch.float32 or exact.is_on())
    )


def swiglu(
    x: torch.Tensor, bias: torch.Tensor | None, fp8_input_store: bool = False, offload: bool = False
) -> torch.Tensor:
    """Compute SwiGLU, [..., 2 F] -> [..., F], in float32, rounded once. The signature is that of
    Megatron's `bias_swiglu_impl`."""
    return SwiGlu.apply((x if bias is None else x + bias).float()).to(x.dtype)


def weighted_swiglu(
    x: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor, fp8_input_store: bool = False
) -> torch.Tensor:
    """Compute SwiGLU times the experts' `weights` [..., 1], in float32, rounded once. The signature
    is that of Megatron's `weighted_bias_swiglu_impl`."""
    return (swiglu(x.float(), bias) * weights.float()).to(x.dtype)


class SwiGlu(torch.autograd.Function):
    """Computes silu(first half) * second half."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return cpu_kernels.swiglu(x)

    @staticmethod
    def backward(ctx, grad):
        return cpu_kernels.swiglu_backward(grad, *ctx.saved_tensors)
