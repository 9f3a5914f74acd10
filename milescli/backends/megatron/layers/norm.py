"""RMSNorm that Megatron's layer spec can build and that allows sequence parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from milescli.backends.megatron.cpu.kernels import rms_norm
from milescli.platform import cpu_kernels, exact


class RmsNorm(torch.nn.Module):
    """Computes x / sqrt(mean(x^2) + eps) * weight over the last dim (arXiv 1910.07467), in float32
    like Hugging Face. If the config sets `layernorm_zero_centered_gamma`, the factor is 1 + weight,
    also in float32."""

    def __init__(
        self,
        config,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        zero_centered: bool | None = None,
        dtype: torch.dtype | None = None,
        **_: object,
    ) -> None:
        """Called by Megatron with the TransformerConfig, whose values replace a `zero_centered` or
        `dtype` (of the weight) of None. Megatron sums the gradient of the weight over tp ranks if
        it is marked as sequence parallel."""
        super().__init__()
        self.eps = eps
        self.zero_centered = (
            config.layernorm_zero_centered_gamma if zero_centered is None else zero_centered
        )
        first = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(first(hidden_size, dtype=dtype or config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor, *, weight: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise x [..., hidden_size]. `weight` replaces its own."""
        weight = self.weight if weight is None else weight
        if exact.is_on() or cpu_kernels.supports(x, weight):
            return rms_norm(x, 1.0 + weight if self.zero_centered else weight, self.eps)
        if x.is_cuda and weight.dtype == x.dtype and not self.zero_centered:
            # one kernel each way, which keeps what `_RmsNorm` keeps; rounded once instead of twice
            return F.rms_norm(x, (weight.shape[0],), weight, self.eps)
        return _RmsNorm.apply(x, 1.0 + weight.float() if self.zero_centered else weight, self.eps)


class HeadsNorm(RmsNorm):
    """Computes RmsNorm over all heads of a position together, x [S, 1, heads, d]. Tensor
    parallelism cuts heads, so the squares are summed over its ranks."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, *, heads: int) -> None:
        """Called by Megatron; `heads` are those of all ranks, each of `hidden_size`."""
        ranks = config.tensor_model_parallel_size
        super().__init__(config, heads * hidden_size // ranks, eps)
        self.ranks = ranks
        # each rank has the weights of its own heads
        self.weight.sequence_parallel = False

    def forward(self, x: torch.Tensor, *, weight: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise x. `weight` is ignored."""
        assert weight is None
        flat = x.flatten(-2)
        if self.ranks == 1:
            return super().forward(flat).view(x.shape)
        wide = flat.float()
        own = wide.square().sum(dim=-1, keepdim=True)
        squares = copy_to_tensor_model_parallel_region(
            reduce_from_tensor_model_parallel_region(own)
        )
        scale = (squares / (flat.shape[-1] * self.ranks) + self.eps).rsqrt()
        return ((wide * scale).to(x.dtype) * self.weight).view(x.shape)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Return the weight, cut by heads."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets
        )


class _RmsNorm(torch.autograd.Function):
    """Implements the backward pass by hand, since autograd saves three more tensors of the input's
    size."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.float()
        scale = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (
            (wide * scale).to(x.dtype).mul_(weight)
            if weight.dtype == x.dtype
            else (wide * scale * weight).to(x.dtype)
        )

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normal = x.float() * scale
        grad = grad.float()
        grad_weight = (grad * normal).reshape(-1, weight.shape[0]).sum(dim=0).to(weight.dtype)
        grad_normal = grad * weight.float()
        inner = (grad_normal * normal).mean(dim=-1, keepdim=True)
        grad_x = (grad_normal - normal.mul_(inner)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None
