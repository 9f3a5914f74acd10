"""The loss that trains the indexer of sparse attention: the divergence KL(p || softmax(scores))
over the positions that a query attends to, where p are the attention's own weights there, summed
over its heads and normalised (DeepSeek-V3.2 report, section 2.1.1, sparse training). The loss
changes no output: the backward pass of attention computes its gradient, block by block of queries,
and passes it to the indexer alone. Megatron's own loss supports no packed rows and holds the logits
of all heads. Used by `dsa` and `compressed`; `step.stepping` gives each row its part of the
mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

_NUMBERS = 2**24
"""Most float32 logits, over all heads, that are computed at once."""
Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""What an indexer's scores over a grid are computed from: queries [N, Q, heads, d], keys [N, K, d],
and weights of heads [N, Q, heads] float32."""


@dataclass(slots=True, kw_only=True)
class RowLoss:
    """Holds a packed row's part of the loss of one update."""

    shares: torch.Tensor
    """[S] float32, weight of each position in the mean over the update; 0.0 at padding."""
    total: torch.Tensor
    """Float64 scalar: the row's part of the mean, in nats, summed over this rank's indexers during
    the backward pass."""
    scores: dict[int, list[Scores]] = field(default_factory=dict)
    """Scores without gradient of the layers whose choice others share, one for each grid."""
    gradients: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Gradients of `scores`, from the later layers that share the choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerComparison:
    """Compares an indexer with the attention of one layer over a grid. N: sequences, Q: queries, K:
    positions or entries to choose from."""

    shares: torch.Tensor
    """[N, Q] float32, weight of each query in the mean; 0.0 at padding."""
    num_heads: int
    """Number of the attention's heads on this rank."""
    lengths: Sequence[int]
    """[N] number of queries of each sequence."""
    attention: Callable[[int, slice], tuple[torch.Tensor, torch.Tensor]]
    """(sequence, its queries) -> weights [queries, keys] float32, summed over the heads of this
    rank, and which keys were chosen [queries, keys] bool; the keys are the first of K."""
    tp_group: dist.ProcessGroup

    def learn(self, scores: Scores, loss: RowLoss) -> list[torch.Tensor]:
        """Return the gradients of `scores`, and add the divergence to `loss`. Collective over the
        ranks that share the heads, which get equal gradients."""
        query, key, weights = scores
        made = [torch.zeros_like(part, dtype=torch.float32) for part in scores]
        heads = max(self.num_heads, query.shape[2])
        for number, length in enumerate(self.lengths):
            step = max(_NUMBERS // (heads * key.shape[1] + 1), 1)
            for first in range(0, length, step):
                at = slice(first, min(first + step, length))
                attended, chosen = self.attention(number, at)
                if self.tp_group.size() > 1:
                    dist.all_reduce(attended, group=self.tp_group)
                own = (query[number, at], key[number, : chosen.shape[1]], weights[number, at])
                divergence, gradients = _compare(*own, attended, chosen, self.shares[number, at])
                loss.total += divergence
                made[0][number, at], made[2][number, at] = gradients[0], gradients[2]
                made[1][number, : chosen.shape[1]] += gradients[1]
        return [grad.to(part.dtype) for grad, part in zip(made, scores, strict=True)]


def index_logits(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the products [Q, heads, K] float32 of an indexer's queries [Q, heads, d] and keys [K,
    d], scaled; relu and the sum over heads make scores of them (DeepSeek-V3.2 report, eq. 1)."""
    return (query.float() @ key.float().T).mul_(query.shape[-1] ** -0.5)


def _compare(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    attended: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
) -> tuple[torch.Tensor, Scores]:
    """Return (the sum of share * KL over the queries, its gradients) for queries [Q, heads, d],
    keys [K, d], weights [Q, heads]. A query without keys to choose from has no divergence."""
    logits = index_logits(query, key)
    fired = logits.relu()
    scores = (weights.unsqueeze(1) @ fired).squeeze(1).masked_fill_(~chosen, -torch.inf)
    log_shares = torch.where(chosen, scores.log_softmax(dim=-1), 0.0)
    seen = attended.sum(dim=-1)
    shares = torch.where(seen > 0, shares, 0.0)
    target = attended / seen.unsqueeze(-1).clamp_min(torch.finfo(torch.float32).tiny)
    divergence = (torch.xlogy(target, target) - target * log_shares).sum(dim=-1)
    slope = torch.where(chosen, log_shares.exp() - target, 0.0) * shares.unsqueeze(-1)
    by_head = slope.unsqueeze(1) * weights.unsqueeze(-1) * (logits > 0) * query.shape[-1] ** -0.5
    gradients = (
        by_head @ key.float(),
        by_head.flatten(0, 1).T @ query.flatten(0, 1).float(),
        (fired @ slope.unsqueeze(-1)).squeeze(-1),
    )
    return (divergence.double() * shares).sum(), gradients


def with_loss(
    attended: torch.Tensor,
    scores: Sequence[Scores],
    learn: Callable[[list[Scores]], Sequence[torch.Tensor]],
) -> torch.Tensor:
    """Return `attended` unchanged. In its backward pass `scores` get the gradients that `learn`
    returns, three for each."""
    return _WithLoss.apply(attended, learn, *(part for each in scores for part in each))


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attended, learn, *scores):
        ctx.learn = learn
        ctx.save_for_backward(*scores)
        return attended.view_as(attended)

    @staticmethod
    def backward(ctx, grad):
        parts = ctx.saved_tensors
        scores = list(zip(parts[::3], parts[1::3], parts[2::3], strict=True))
        with torch.no_grad():
            return grad, None, *ctx.learn(scores)
