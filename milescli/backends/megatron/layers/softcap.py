"""Logits that are capped smoothly: cap * tanh(logits / cap). Pure; used by `gemma`."""

from __future__ import annotations

import torch


def softcap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Of any shape and float dtype; computed in float32. Keeps one tensor of the logits' size for
    the backward pass, and not the one that it returns: the log-probs write their gradient over
    that."""
    return _Softcap.apply(logits, cap)


class _Softcap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, cap: float):
        bent = (logits.float() / cap).tanh_()
        ctx.save_for_backward(bent.to(logits.dtype))
        return (bent * cap).to(logits.dtype)

    @staticmethod
    def backward(ctx, grad):
        (bent,) = ctx.saved_tensors
        return grad * (1 - bent.float().square()).to(grad.dtype), None
