"""Causal attention over many short sequences on a CPU, in a compiled kernel: PyTorch's own goes
through them head by head, and needs several times as long. Called by `layers.attention`."""

from __future__ import annotations

import torch

from milescli.platform import kernels

LONGEST = 128
"""Positions of a sequence. Beyond, PyTorch's kernel, which multiplies matrices, is as fast."""


class ShortAttention(torch.autograd.Function):
    """Sequences of a row where they lie: query [S, H, d], key and value [S, G, d] -> [S, H, d].
    `starts` [sequences + 1] int32: where each begins, then S; `longest`: positions of one."""

    @staticmethod
    def forward(ctx, query, key, value, starts, longest, scale):
        ctx.settings = {"longest": longest, "scale": scale}
        out, logs = kernels.attend_packed(query, key, value, starts, **ctx.settings)
        ctx.save_for_backward(query, key, value, starts, logs)
        return out

    @staticmethod
    def backward(ctx, grad):
        gradients = kernels.attend_packed_backward(grad, *ctx.saved_tensors, **ctx.settings)
        return *gradients, None, None, None
