"""Sparse attention of DeepSeek-V3.2 (DSA) over packed rows: an indexer scores every position before
a query, and the query attends to the best `topk`. Names are those of Megatron's experimental
module, which does not support packed rows. Used by `mla`.

The choice has no gradient, so the indexer stays as loaded, unless `model.indexer` trains it with
the loss of `indexer_loss`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec

from milescli.backends.megatron.layers.attention import Grid, PackedAttention, PackedRow
from milescli.backends.megatron.layers.indexer_loss import (
    IndexerComparison,
    Scores,
    index_logits,
    with_loss,
)
from milescli.backends.megatron.layers.rope import Angles, rotate
from milescli.models.facts import Indexer as Sizes
from milescli.models.facts import ModelFacts

QUERIES = 128
"""Queries whose scores are computed at a time."""
Choice = dict[int, torch.Tensor]
"""id of a grid of the row -> [N, 1, Q, K] bool, True where a query looks at a key"""


def options(facts: ModelFacts) -> dict[str, object]:
    """Return Megatron's settings of the indexer; empty for a model without one."""
    if facts.indexer is None:
        return {}
    return {
        # hands hidden states and the queries' latent to the core attention
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": facts.indexer.num_heads,
        "dsa_indexer_head_dim": facts.indexer.head_dim,
        "dsa_indexer_topk": facts.indexer.topk,
    }


def core_attention(facts: ModelFacts, *, layer: int) -> ModuleSpec | None:
    """Return the core attention of layer `layer` (from 0); None if the model has no indexer."""
    if facts.indexer is None:
        return None
    choosers = [number for number, each in enumerate(facts.layers) if not each.shares_choice]
    chooser = max(number for number in choosers if number <= layer)
    following = min((number for number in choosers if number > layer), default=len(facts.layers))
    return ModuleSpec(
        module=SparseAttention,
        params={
            "facts": facts,
            "layer": layer,
            "chooser": chooser,
            "num_sharing": following - chooser,
        },
    )


class SparseAttention(PackedAttention):
    """Attends to the positions that its own indexer, or that of an earlier layer, chose."""

    def __init__(
        self, *args, facts: ModelFacts, layer: int, chooser: int, num_sharing: int, **options
    ) -> None:
        """Called by Megatron. `chooser` is the layer whose indexer chooses for this one, and for
        `num_sharing` layers."""
        super().__init__(*args, kind="mla", **options)
        assert facts.indexer is not None
        self.topk, self.chooser, self.num_sharing = facts.indexer.topk, chooser, num_sharing
        self.trains_indexer = facts.indexer.trained
        self.indexer = (
            LightningIndexer(self.config, facts, tp_group=self.tp_group)
            if chooser == layer
            else None
        )
        self._chosen: Choice = {}

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        *,
        x,
        qr,
        packed_seq_params: PackedRow | None = None,
        **options,
    ):
        """Choose positions and attend; Megatron calls this. `x` are hidden states, `qr` the
        queries' latent, both in this rank's part."""
        row = packed_seq_params
        assert isinstance(row, PackedRow), "this attention computes packed rows only"
        loss = row.indexer_loss if self.trains_indexer else None
        scores: list[Scores] = []
        if self.indexer is None:
            self._chosen = row.chosen[self.chooser]
        else:
            self._chosen = {}
            chooses = any(max(grid.lengths) > self.topk for grid in row.grids)
            if chooses or loss is not None:
                scores = self.indexer(x.detach(), qr.detach(), row)
            if chooses:
                self._chosen = self.indexer.choose(scores, row)
            if self.num_sharing > 1:
                # kept by layer, as recomputation comes by the layers in reverse
                row.chosen[self.chooser] = self._chosen
        out = super().forward(query, key, value, attention_mask, packed_seq_params=row, **options)
        if loss is None:
            return out
        if self.indexer is not None and self.num_sharing > 1:
            loss.scores[self.chooser] = [tuple(part.detach() for part in each) for each in scores]
        if not torch.is_grad_enabled():
            return out
        learn = partial(self._learn, query.detach(), key.detach(), self._chosen, row)
        return with_loss(out, scores, learn)

    def _learn(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        chosen: Choice,
        row: PackedRow,
        scores: list[Scores],
    ) -> list[torch.Tensor]:
        """Return the gradients of the scores. If an indexer chooses for several layers, the
        gradient is the mean over them. A layer without an indexer stores its own for the layer that
        has it, whose backward pass comes later. query, key [S, heads, d]."""
        loss = row.indexer_loss
        assert loss is not None and row.queries is not None
        shares = loss.shares / self.num_sharing
        # a hole of a grid repeats some position, and is beyond the length of its sequence
        filled = _by_grid([row.queries.fill(part) for part in (query, key, shares)], row)
        gradients = list[torch.Tensor]()
        scores = scores or loss.scores[self.chooser]
        for index, grid, parts in zip(scores, row.grids, filled, strict=True):
            lesson = IndexerComparison(
                shares=parts[2],
                num_heads=query.shape[1],
                lengths=grid.lengths,
                attention=partial(self._attention, parts[0], parts[1], chosen.get(id(grid))),
                tp_group=self.tp_group,
            )
            gradients += lesson.learn(index, loss)
        before = loss.gradients.pop(self.chooser, None)
        if before is not None:
            gradients = [ours.add_(theirs) for ours, theirs in zip(gradients, before, strict=True)]
        if self.indexer is not None:
            loss.scores.pop(self.chooser, None)
            return gradients
        loss.gradients[self.chooser] = gradients
        return []

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        chosen: torch.Tensor | None,
        number: int,
        at: slice,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute `IndexerComparison.attention` from queries and keys [N, Q, heads, d]."""
        seen = slice(0, at.stop)
        if chosen is None:
            visible = torch.ones(at.stop - at.start, at.stop, dtype=torch.bool, device=query.device)
            visible = visible.tril(at.start)
        else:
            visible = chosen[number, 0, at, seen]
        q, k = (part.transpose(0, 1).float() for part in (query[number, at], key[number, seen]))
        logits = (q @ k.mT).mul_(self.scale).masked_fill_(~visible, -torch.inf)
        return logits.softmax(dim=-1).sum(dim=0), visible

    def _is_plain(self, query, value, longest: int) -> bool:
        return not self._chosen and super()._is_plain(query, value, longest)

    def _attend(self, query, key, value, *, grid: Grid) -> torch.Tensor:
        chosen = self._chosen.get(id(grid))
        narrow = max(query.shape[-1] - value.shape[-1], 0)
        value = F.pad(value, (0, narrow))
        if chosen is None:
            out = super()._attend(query, key, value, grid=grid)
        else:
            out = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                attn_mask=chosen,
                scale=self.scale,
            ).transpose(1, 2)
        return out[..., : out.shape[-1] - narrow]


class LightningIndexer(torch.nn.Module):
    """Scores positions with a few narrow heads: sum over heads of weight * relu(q . k)
    (DeepSeek-V3.2 report, eq. 1)."""

    def __init__(self, config, facts: ModelFacts, *, tp_group) -> None:
        """Build the whole indexer on every tensor-parallel rank."""
        super().__init__()
        assert facts.indexer is not None and facts.mla is not None
        self.sizes, self.rotated = facts.indexer, facts.mla.qk_rope_head_dim
        self.tp_group, self.scattered = tp_group, config.sequence_parallel and tp_group.size() > 1
        width = self.sizes.num_heads * self.sizes.head_dim
        made = {"dtype": config.params_dtype}
        self.linear_wq_b = torch.nn.Linear(facts.mla.q_lora_rank, width, bias=False, **made)
        self.linear_wk = torch.nn.Linear(facts.hidden_size, self.sizes.head_dim, bias=False, **made)
        self.k_norm = torch.nn.LayerNorm(self.sizes.head_dim, eps=self.sizes.norm_eps, **made)
        self.linear_weights_proj = torch.nn.Linear(
            facts.hidden_size, self.sizes.num_heads, bias=False, **made
        )
        self.requires_grad_(self.sizes.trained)
        for part in (self.linear_wk, self.k_norm, self.linear_weights_proj):
            for weight in part.parameters():
                # these see a part of the positions on each rank
                weight.sequence_parallel = self.scattered

    def forward(self, x: torch.Tensor, qr: torch.Tensor, row: PackedRow) -> list[Scores]:
        """Return the inputs of each grid's scores, from x [S, 1, hidden] and qr [S, 1,
        q_lora_rank]."""
        sizes, angles = (
            self.sizes,
            replace(row.angles["mla"], interleaved=self.sizes.rope_interleaved),
        )
        key = self.k_norm(self.linear_wk(x))
        weights = self.linear_weights_proj(x).float() * sizes.num_heads**-0.5
        if self.scattered:
            # the ranks learn alike from all positions
            key, weights, qr = (
                gather_from_sequence_parallel_region(
                    part, tensor_parallel_output_grad=False, group=self.tp_group
                )
                for part in (key, weights, qr)
            )
        query = self._rotate(
            self.linear_wq_b(qr).squeeze(1).unflatten(-1, (sizes.num_heads, sizes.head_dim)), angles
        )
        key, weights = self._rotate(key, angles).squeeze(1), weights.squeeze(1)
        assert row.queries is not None
        return _by_grid([row.queries.fill(part) for part in (query, key, weights)], row)

    @torch.no_grad()
    def choose(self, scores: Sequence[Scores], row: PackedRow) -> Choice:
        """Choose the positions that the row's queries attend to; grids whose queries attend to
        everything are left out."""
        return {
            id(grid): _choose(*parts, lengths=grid.lengths, sizes=self.sizes)
            for grid, parts in zip(row.grids, scores, strict=True)
            if max(grid.lengths) > self.sizes.topk
        }

    def _rotate(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Apply rotary embeddings to the first dims of x [S, heads, head_dim]."""
        turned, plain = x.split([self.rotated, self.sizes.head_dim - self.rotated], dim=-1)
        return torch.cat([rotate(turned, angles), plain], dim=-1)


def _by_grid(filled: Sequence[torch.Tensor], row: PackedRow) -> list[tuple[torch.Tensor, ...]]:
    """Split tensors [cells, ...] by grid: for each grid, [N, Q, ...] of all of them."""
    sizes = [grid.shape[0] * grid.shape[1] for grid in row.grids]
    by_grid = zip(*(part.split(sizes) for part in filled), strict=True)
    return [
        tuple(part.unflatten(0, grid.shape[:2]) for part in parts)
        for grid, parts in zip(row.grids, by_grid, strict=True)
    ]


def _choose(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    *,
    lengths: list[int],
    sizes: Sizes,
) -> torch.Tensor:
    """Return the chosen positions, [N, Q, heads, d], [N, Q, d], [N, Q, heads] -> [N, 1, Q, Q] bool.
    Some queries of one sequence at a time: that bounds the memory for the scores of all heads, and
    the choice among equal scores must not depend on the other sequences."""
    longest = query.shape[1]
    causal = torch.ones(longest, longest, dtype=torch.bool, device=query.device).tril()
    visible = causal.repeat(len(query), 1, 1, 1)
    for number, length in enumerate(lengths):
        if length <= sizes.topk:
            continue
        q, k, w = (part[number, :length] for part in (query, key, weights))
        for first in range(0, length, QUERIES):
            at = slice(first, min(first + QUERIES, length))
            # [Q, heads, K]
            logits = index_logits(q[at], k).relu_()
            scores = (
                (w[at].unsqueeze(1) @ logits)
                .squeeze(1)
                .masked_fill_(~causal[at, :length], float("-inf"))
            )
            best = torch.zeros_like(scores, dtype=torch.bool).scatter_(
                -1, scores.topk(sizes.topk, dim=-1).indices, True
            )
            visible[number, 0, at, :length] &= best
    return visible
