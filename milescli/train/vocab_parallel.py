"""Log-prob of the target and entropy from logits whose vocabulary is spread over ranks: no gather
and no second copy of the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

CHUNK_TOKENS = 2048
"""Tokens looked at at once: bounds the scratch memory to a few [CHUNK_TOKENS, vocabulary / tp]
tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """Which part of the vocabulary this rank's logits are."""

    start: int = 0
    """Token id of column 0."""
    size: int
    """Columns that stand for tokens; columns beyond are padding and take no part."""
    group: dist.ProcessGroup | None = None
    """Ranks that hold the other parts; None where this rank holds all."""


def target_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, *, shard: VocabShard, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits / temperature)[target] [T] and the entropy of that distribution [T],
    float32, equal on all ranks.

    `logits` [T, columns] of any float dtype, `targets` [T] int64 token ids. Differentiable in both
    results. The backward pass writes the gradient over the logits: they must not be used afterwards
    (autograd refuses if they are). With x = logits / temperature, p = softmax(x): d logprob / dx_j
    = [j = target] - p_j; d entropy / dx_j = -p_j (x_j - sum_k p_k x_k).
    """
    assert logits.dim() == 2 and targets.shape == logits.shape[:1], (logits.shape, targets.shape)
    return _TargetLogprobs.apply(logits, targets, shard, temperature)


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, shard: VocabShard, temperature: float):
        num_tokens = logits.shape[0]
        peak = torch.full((num_tokens,), -torch.inf, dtype=torch.float32, device=logits.device)
        if shard.size:
            for rows in _chunks(num_tokens):
                peak[rows] = logits[rows, : shard.size].amax(dim=1).float() / temperature
        _all_reduce(peak, dist.ReduceOp.MAX, shard)
        local = targets - shard.start
        owned = (local >= 0) & (local < shard.size)
        local = torch.where(owned, local, 0)
        sums = torch.zeros((3, num_tokens), dtype=torch.float32, device=logits.device)
        if shard.size:
            for rows in _chunks(num_tokens):
                _sum_rows(
                    logits[rows, : shard.size],
                    local[rows],
                    owned[rows],
                    peak[rows],
                    temperature,
                    out=sums[:, rows],
                )
        _all_reduce(sums, dist.ReduceOp.SUM, shard)
        log_total = sums[0].log() + peak
        mean = sums[1] / sums[0] + peak
        """sum_k p_k x_k"""
        ctx.shard, ctx.temperature = shard, temperature
        ctx.save_for_backward(logits, local, owned, log_total, mean)
        ctx.set_materialize_grads(False)
        return sums[2] + peak - log_total, log_total - mean

    @staticmethod
    def backward(ctx, grad_logprob, grad_entropy):
        logits, local, owned, log_total, mean = ctx.saved_tensors
        grad = logits.detach()
        """The same memory: the logits end here."""
        size = ctx.shard.size
        for rows in _chunks(logits.shape[0]):
            x = _heated(grad[rows, :size], ctx.temperature)
            p = (x - log_total[rows, None]).exp_()
            if grad_entropy is None:
                total = p.mul_(-grad_logprob[rows, None])
            else:
                scale = (mean[rows, None] - x).mul_(grad_entropy[rows, None])
                total = p.mul_(
                    scale if grad_logprob is None else scale.sub_(grad_logprob[rows, None])
                )
            if grad_logprob is not None and size:
                hit = torch.where(owned[rows], grad_logprob[rows], 0.0)
                total.scatter_add_(1, local[rows, None], hit[:, None])
            grad[rows, :size] = _heated(total, ctx.temperature)
        grad[:, size:] = 0
        return grad, None, None, None


def _sum_rows(logits, local, owned, peak, temperature: float, *, out) -> None:
    """Into out [3, rows]: sum exp(x - peak), sum exp(x - peak) (x - peak), and x - peak of the
    target where it is here."""
    shifted = _heated(logits, temperature) - peak[:, None]
    out[2] = torch.where(owned, shifted.gather(1, local[:, None])[:, 0], 0.0)
    weights = shifted.exp()
    out[0] = weights.sum(dim=1)
    out[1] = weights.mul_(shifted).sum(dim=1)


def _heated(x: torch.Tensor, temperature: float) -> torch.Tensor:
    """x / temperature in float32; at 1, x itself, which arithmetic with a float32 tensor widens as
    it reads it: a pass over the memory less."""
    return x if temperature == 1.0 else x.float() / temperature


def _chunks(num_tokens: int) -> list[slice]:
    return [
        slice(start, min(start + CHUNK_TOKENS, num_tokens))
        for start in range(0, num_tokens, CHUNK_TOKENS)
    ]


def _all_reduce(tensor: torch.Tensor, operation: dist.ReduceOp, shard: VocabShard) -> None:
    if shard.group is not None and shard.group.size() > 1:
        dist.all_reduce(tensor, op=operation, group=shard.group)
