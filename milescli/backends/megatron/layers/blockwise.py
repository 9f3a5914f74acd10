"""Attention that PyTorch's own kernels cannot express, or not without the whole matrix: sliding
windows, sinks, capped logits, values of another width than keys, and masks on a device. Computed in
blocks of queries, so that memory grows with the length of a sequence and not with its square.
Called by `attention`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_MIN_BLOCK = 64
_MAX_BLOCK = 512
"""Most queries that are computed at once: N heads [block, K] float32 are in memory at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Holds queries number first .. last of every sequence of a grid, and the keys that any of them
    sees."""

    queries: slice
    keys: slice
    first: torch.Tensor | None
    """[N or 1, 1, 1, queries, 1] the first key that each query sees; None: the first of all"""
    last: torch.Tensor
    """[N or 1, 1, 1, queries, 1] the last key that each query sees"""

    def hidden(self) -> torch.Tensor:
        """Return the mask [N or 1, 1, 1, queries, keys] bool, True where the query does not see the
        key. Made on demand: all masks at once would be the square that blocks avoid."""
        keys = torch.arange(self.keys.start, self.keys.stop, device=self.last.device)
        hidden = keys > self.last
        return hidden if self.first is None else hidden.logical_or_(keys < self.first)


def make_blocks(
    places: np.ndarray,
    *,
    num_keys: int,
    window: int,
    device: torch.device,
    together: tuple[np.ndarray, np.ndarray] | None = None,
) -> list[Block]:
    """Return blocks of the queries at `places` [N, Q] in their sequences. A query sees the keys up
    to its own place, at most `window` of them (0: all). `together`: first and last [N, Q] place of
    the image to which each query's token belongs (for text its own place), which the query sees
    too."""
    if together is None and places.shape[0] > 1 and bool((places == places[:1]).all()):
        places = places[:1]
    first, last = np.maximum(places - window + 1, 0) if window else None, places
    if together is not None:
        first = None if first is None else np.minimum(first, together[0])
        last = together[1]
    # a block of as many queries as the window is wide looks at half as many keys again as it needs
    # to
    size = min(max(window, _MIN_BLOCK), _MAX_BLOCK) if window else _MAX_BLOCK
    blocks = []
    for start in range(0, places.shape[1], size):
        queries = slice(start, min(start + size, places.shape[1]))
        low = 0 if first is None else int(first[:, queries].min())
        high = min(int(last[:, queries].max()) + 1, num_keys)
        blocks.append(
            Block(
                queries=queries,
                keys=slice(low, high),
                first=None if first is None else _by_query(first[:, queries], device),
                last=_by_query(last[:, queries], device),
            )
        )
    return blocks


def _by_query(places: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(places.copy())[:, None, None, :, None].to(device)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    blocks: list[Block],
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Return attention, [N, Q, heads, d], [N, K, groups, d], [N, K, groups, v] -> [N, Q, heads, v],
    computed in float32.

    Logits are scale * q.k, then softcap * tanh(logits / softcap). `sinks` [heads] are logits that
    take part in the softmax without a value (gpt-oss). Differentiable; the backward pass recomputes
    the logits, as FlashAttention does (arXiv 2205.14135)."""
    return _Attend.apply(query, key, value, sinks, blocks, scale, softcap)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, blocks, scale, softcap):
        q, k, v = _grouped(query, key.shape[2]), _by_head(key), _by_head(value)
        out = query.new_empty((*q.shape[:-1], value.shape[-1]), dtype=torch.float32)
        log_total = query.new_empty(q.shape[:-1], dtype=torch.float32)
        sink = None if sinks is None else sinks.detach().float().view(1, key.shape[2], -1, 1)
        for block in blocks:
            logits, _ = _logits(q, k, block, scale=scale, softcap=softcap)
            total = logits.logsumexp(dim=-1)
            if sink is not None:
                total = torch.logaddexp(total, sink)
            log_total[..., block.queries] = total
            weights = logits.sub_(total[..., None]).exp_()
            out[..., block.queries, :] = weights @ v[:, :, :, block.keys]
        ctx.blocks, ctx.scale, ctx.softcap = blocks, scale, softcap
        result = _ungrouped(out).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, result, log_total)
        return result

    @staticmethod
    def backward(ctx, grad):
        query, key, value, sinks, result, log_total = ctx.saved_tensors
        groups, scale = key.shape[2], ctx.scale
        q, k, v, g = _grouped(query, groups), _by_head(key), _by_head(value), _grouped(grad, groups)
        inner = (g * _grouped(result, groups)).sum(dim=-1)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block in ctx.blocks:
            at, seen = block.queries, block.keys
            logits, slope = _logits(q, k, block, scale=scale, softcap=ctx.softcap)
            weights = logits.sub_(log_total[..., at, None]).exp_()
            grad_v[:, :, :, seen] += _over_queries(weights, g[..., at, :])
            grad_logits = (
                (g[..., at, :] @ v[:, :, :, seen].mT).sub_(inner[..., at, None]).mul_(weights)
            )
            if slope is not None:
                grad_logits.mul_(slope)
            grad_logits.mul_(scale)
            grad_q[..., at, :] = grad_logits @ k[:, :, :, seen]
            grad_k[:, :, :, seen] += _over_queries(grad_logits, q[..., at, :])
        grad_sinks = None
        if sinks is not None:
            weight = (sinks.float().view(1, groups, -1, 1) - log_total).exp_()
            grad_sinks = (weight * inner).sum(dim=(0, 3)).neg_().reshape(-1).to(sinks.dtype)
        grad_k, grad_v = grad_k[:, :, 0].transpose(1, 2), grad_v[:, :, 0].transpose(1, 2)
        return (
            _ungrouped(grad_q).to(query.dtype),
            grad_k.to(key.dtype),
            grad_v.to(value.dtype),
            grad_sinks,
            None,
            None,
            None,
        )


def _logits(
    q, k, block: Block, *, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the logits [N, groups, per group, queries, keys], -inf where a key is not seen; and
    the derivative of the cap."""
    logits = (q[..., block.queries, :] @ k[:, :, :, block.keys].mT).mul_(scale)
    slope = None
    if softcap is not None:
        bent = logits.div_(softcap).tanh_()
        slope = 1 - bent.square()
        logits = bent.mul_(softcap)
    return logits.masked_fill_(block.hidden(), -torch.inf), slope


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Reshape [N, Q, heads, d] -> [N, groups, per group, Q, d] float32."""
    return x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).float()


def _ungrouped(x: torch.Tensor) -> torch.Tensor:
    """Invert `_grouped`, except for the dtype."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """Reshape [N, K, groups, d] -> [N, groups, 1, K, d] float32."""
    return x.transpose(1, 2).unsqueeze(2).float()


def _over_queries(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return [N, groups, 1, K, d], the product of [N, groups, per group, Q, K] and [N, groups, per
    group, Q, d], summed over all queries of a group."""
    return (weights.flatten(2, 3).mT @ rows.flatten(2, 3)).unsqueeze(2)
