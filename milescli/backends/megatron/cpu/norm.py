"""RMSNorm on a CPU, in a compiled kernel; where there is none, block by block of rows, so that the
memory is read and written once. Called by `layers.norm`."""

from __future__ import annotations

import torch

from milescli.backends.megatron.cpu.blocks import row_blocks
from milescli.platform import kernels


class CpuRmsNorm(torch.autograd.Function):
    """x [..., H] float32, weight [H] float32 -> x / sqrt(mean(x^2) + eps) * weight."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.compiled = kernels.suit(x, weight)
        if ctx.compiled:
            scale = torch.empty(x.shape[:-1])
            out, _ = kernels.rms_norm(x, weight, eps, scales=scale)
            ctx.save_for_backward(x, weight, scale)
            return out
        rows = x.reshape(-1, x.shape[-1])
        squares = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_()
        scale = squares.div_(rows.shape[1]).add_(eps).rsqrt_()
        out = torch.empty(x.shape, dtype=x.dtype)
        out_rows = out.view(rows.shape)
        for block in row_blocks(*rows.shape):
            torch.mul(rows[block], scale[block], out=out_rows[block]).mul_(weight)
        # not `rows`, which is a copy where x has gaps between its rows
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        if ctx.compiled:
            return *kernels.rms_norm_backward(grad, x, weight, scale), None
        width = x.shape[-1]
        rows = x.reshape(-1, width)
        grad_rows = grad.reshape(rows.shape)
        out = torch.empty(rows.shape, dtype=rows.dtype)
        grad_weight = torch.zeros_like(weight)
        for block in row_blocks(*rows.shape):
            normal = rows[block] * scale[block]
            product = grad_rows[block] * normal
            grad_weight += product.sum(dim=0)
            inner = torch.mv(product, weight)[:, None]
            part = torch.mul(grad_rows[block], weight, out=out[block])
            part.addcmul_(normal, inner, value=-1.0 / width).mul_(scale[block])
        return out.view(grad.shape), grad_weight, None
