"""Causal attention over many short sequences on a CPU, as matrix products over a block of sequences
at once: PyTorch's own kernel goes through them head by head, and needs twice as long. Called by
`layers.attention`."""

from __future__ import annotations

import torch

from milescli.platform import kernels

LONGEST = 128
"""Positions of a sequence. Beyond, PyTorch's kernel, which skips what is not seen, is as fast."""
_BLOCK_WEIGHTS = 262_144
"""1 MiB of float32."""


class PackedShortAttention(torch.autograd.Function):
    """Sequences of a row where they lie, in a compiled kernel: query [S, H, d], key and value
    [S, G, d] -> [S, H, d]. `starts` [sequences + 1] int32: where each begins, then S; `longest`:
    positions of one."""

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


class ShortAttention(torch.autograd.Function):
    """N sequences of S positions; H heads, r to each of G groups: query [N, S, H, d], key and value
    [N, S, G, d], float32 -> [N, S, H, d]. Position i sees those up to i.
    The weights are computed again in the backward pass, as PyTorch's kernel does."""

    @staticmethod
    def forward(ctx, query, key, value, scale):
        count, length, heads, _ = query.shape
        groups = key.shape[2]
        unseen = _unseen(length, heads // groups)
        out = query.new_empty(query.shape)
        for block in _blocks(count, heads * length * length):
            q, k, v = _by_query(query[block], groups), _by_key(key[block]), _by_key(value[block])
            weights = torch.baddbmm(unseen, q, k.mT, alpha=scale).softmax(dim=-1)
            _store_by_query(out[block], torch.bmm(weights, v), groups)
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value = ctx.saved_tensors
        count, length, heads, _ = query.shape
        groups = key.shape[2]
        unseen = _unseen(length, heads // groups)
        grad_query, grad_key, grad_value = (x.new_empty(x.shape) for x in (query, key, value))
        for block in _blocks(count, heads * length * length):
            q, g = _by_query(query[block], groups), _by_query(grad[block], groups)
            k, v = _by_key(key[block]), _by_key(value[block])
            weights = torch.baddbmm(unseen, q, k.mT, alpha=ctx.scale).softmax(dim=-1)
            _store_by_key(grad_value[block], torch.bmm(weights.mT, g))
            slope = torch._softmax_backward_data(torch.bmm(g, v.mT), weights, -1, weights.dtype)
            _store_by_query(grad_query[block], torch.bmm(slope, k).mul_(ctx.scale), groups)
            _store_by_key(grad_key[block], torch.bmm(slope.mT, q).mul_(ctx.scale))
        return grad_query, grad_key, grad_value, None


def _unseen(length: int, heads: int) -> torch.Tensor:
    """[heads * S, S] added to the logits: -inf where a position does not see another."""
    return torch.full((length, length), -torch.inf).triu_(1).repeat(heads, 1)


def _blocks(count: int, weights_each: int) -> list[slice]:
    size = max(_BLOCK_WEIGHTS // weights_each, 1)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _by_query(x: torch.Tensor, groups: int) -> torch.Tensor:
    """[n, S, H, d] -> [n * G, r * S, d]: the heads of a group below each other."""
    return x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3).flatten(0, 1)


def _by_key(x: torch.Tensor) -> torch.Tensor:
    """[n, S, G, d] -> [n * G, S, d]"""
    return x.transpose(1, 2).flatten(0, 1)


def _store_by_query(out: torch.Tensor, x: torch.Tensor, groups: int) -> None:
    """The inverse of `_by_query`, into memory that is there."""
    count, length, heads, dim = out.shape
    rows = x.view(count, groups, heads // groups, length, dim)
    out.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).copy_(rows)


def _store_by_key(out: torch.Tensor, x: torch.Tensor) -> None:
    """The inverse of `_by_key`, into memory that is there."""
    count, length, groups, dim = out.shape
    out.transpose(1, 2).copy_(x.view(count, groups, length, dim))
