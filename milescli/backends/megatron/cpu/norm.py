"""RMSNorm on a CPU in a compiled kernel. Called by `layers.norm`."""

from __future__ import annotations

import torch

from milescli.platform import cpu_kernels


class CpuRmsNorm(torch.autograd.Function):
    """x [..., H] float32, weight [H] float32 -> x / sqrt(mean(x^2) + eps) * weight."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        scales = torch.empty(x.shape[:-1])
        out, _ = cpu_kernels.rms_norm(x, weight, eps, scales=scales)
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    def backward(ctx, grad):
        return *cpu_kernels.rms_norm_backward(grad, *ctx.saved_tensors), None
