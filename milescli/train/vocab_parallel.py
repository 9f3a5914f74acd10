"""Log-probs of targets, of the likeliest tokens, and entropy from logits whose vocabulary is spread
over ranks: no gather and no second copy of the logits."""

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
    """log softmax(logits / temperature)[target], as `targets`, and the entropy of that distribution
    [T], float32, equal on all ranks.

    `logits` [T, columns] of any float dtype, `targets` [T] or [T, n] int64 token ids.
    Differentiable in both results. The backward pass writes the gradient over the logits: they must
    not be used afterwards (autograd refuses if they are). With x = logits / temperature, p =
    softmax(x): d logprob / dx_j = [j = target] - p_j; d entropy / dx_j = -p_j (x_j - sum_k p_k
    x_k).
    """
    assert logits.dim() == 2 and targets.shape[:1] == logits.shape[:1], (
        logits.shape,
        targets.shape,
    )
    rows = targets.view(len(targets), -1)
    logprobs, entropy = _TargetLogprobs.apply(logits, rows, shard, temperature)
    return logprobs.view(targets.shape), entropy


@torch.no_grad()
def top_logprobs(
    logits: torch.Tensor, *, count: int, shard: VocabShard, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64, log-probs float32) [T, count] of the likeliest tokens under softmax(logits /
    temperature), likeliest first, equal on all ranks; of equals, any. `logits` as in
    `target_logprobs`; `count` is at most the vocabulary's size."""
    ids = []
    for rows in _chunks(len(logits)):
        here = logits[rows, : shard.size].float()
        # ranks may own fewer columns than `count`: what they lack is never chosen
        least = here.new_full((len(here), max(0, count - shard.size)), -torch.inf)
        values, columns = torch.cat([here, least], dim=1).topk(count)
        values, columns = (_gathered(part, shard) for part in (values, columns + shard.start))
        best = values.topk(count).indices
        ids.append(columns.gather(1, best))
    chosen = torch.cat(ids) if ids else torch.zeros((0, count), dtype=torch.int64)
    return chosen, target_logprobs(logits, chosen, shard=shard, temperature=temperature)[0]


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
        sums = torch.zeros(
            (2 + targets.shape[1], num_tokens), dtype=torch.float32, device=logits.device
        )
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
        return (sums[2:] + peak - log_total).T.contiguous(), log_total - mean

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
                total = p.mul_(-grad_logprob[rows].sum(1, keepdim=True))
            else:
                scale = (mean[rows, None] - x).mul_(grad_entropy[rows, None])
                if grad_logprob is not None:
                    scale.sub_(grad_logprob[rows].sum(1, keepdim=True))
                total = p.mul_(scale)
            if grad_logprob is not None and size:
                hit = torch.where(owned[rows], grad_logprob[rows], 0.0)
                total.scatter_add_(1, local[rows], hit)
            grad[rows, :size] = _heated(total, ctx.temperature)
        grad[:, size:] = 0
        return grad, None, None, None


def _sum_rows(logits, local, owned, peak, temperature: float, *, out) -> None:
    """Into out [2 + n, rows]: sum exp(x - peak), sum exp(x - peak) (x - peak), and x - peak of the
    n targets where they are here."""
    shifted = _heated(logits, temperature) - peak[:, None]
    out[2:] = torch.where(owned, shifted.gather(1, local), 0.0).T
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


def _gathered(part: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """[rows, k] of every rank -> [rows, ranks * k]."""
    if shard.group is None or shard.group.size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(shard.group.size())]
    dist.all_gather(parts, part.contiguous(), group=shard.group)
    return torch.cat(parts, dim=1)
