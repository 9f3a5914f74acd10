"""Sparse attention of DeepSeek-V3.2 (DSA) over packed rows: an indexer scores every position before
a query's, and the attention looks at the best `topk`. Names are those of Megatron's experimental
module, which computes no packed rows. Used by `mla`.

The indexer is frozen: the choice has no gradient, and the auxiliary loss that trains it in the
report (section 2.1.1, a divergence from the attention's own weights) has no place in the objectives
of `train`. Weights are loaded, kept and written as they were."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec

from milescli.backends.megatron.layers.attention import Grid, PackedAttention, PackedRow
from milescli.backends.megatron.layers.rope import Angles, rotate
from milescli.models.facts import Indexer as Sizes
from milescli.models.facts import ModelFacts

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
    chooser = layer
    while facts.layers[chooser].shares_choice:
        chooser -= 1
    shared = any(layer.shares_choice for layer in facts.layers)
    return ModuleSpec(
        module=SparseAttention,
        params={"facts": facts, "layer": layer, "chooser": chooser, "keeps_choice": shared},
    )


class SparseAttention(PackedAttention):
    """Attends to the positions that its indexer, or that of an earlier layer, chose."""

    def __init__(
        self, *args, facts: ModelFacts, layer: int, chooser: int, keeps_choice: bool, **options
    ) -> None:
        """Called by Megatron. `chooser` is the layer whose indexer chooses for this one;
        `keeps_choice` stores the choice for other layers."""
        super().__init__(*args, kind="mla", **options)
        assert facts.indexer is not None
        self.topk, self.chooser, self.keeps_choice = facts.indexer.topk, chooser, keeps_choice
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
        """Called by Megatron. `x` are hidden states, `qr` the queries' latent, both in this rank's
        part."""
        row = packed_seq_params
        assert isinstance(row, PackedRow), "this attention computes packed rows only"
        if self.indexer is None:
            self._chosen = row.chosen[self.chooser]
        else:
            self._chosen = (
                self.indexer(x, qr, row)
                if any(max(grid.lengths) > self.topk for grid in row.grids)
                else {}
            )
            if self.keeps_choice:
                # kept by layer, as recomputation comes by the layers in reverse
                row.chosen[self.chooser] = self._chosen
        return super().forward(query, key, value, attention_mask, packed_seq_params=row, **options)

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
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x: torch.Tensor, qr: torch.Tensor, row: PackedRow) -> Choice:
        """Choose what the row's queries attend to, from x [S, 1, hidden] and qr [S, 1,
        q_lora_rank]; grids whose queries attend to everything are left out."""
        sizes, angles = (
            self.sizes,
            replace(row.angles["mla"], interleaved=self.sizes.rope_interleaved),
        )
        key = self.k_norm(self.linear_wk(x))
        weights = self.linear_weights_proj(x).float() * sizes.num_heads**-0.5
        if self.scattered:
            key, weights, qr = (
                gather_from_sequence_parallel_region(part, group=self.tp_group)
                for part in (key, weights, qr)
            )
        query = self._rotate(
            self.linear_wq_b(qr).squeeze(1).unflatten(-1, (sizes.num_heads, sizes.head_dim)), angles
        )
        key, weights = self._rotate(key, angles).squeeze(1), weights.squeeze(1)
        query, key, weights = (
            query[row.queries.position],
            key[row.keys.position],
            weights[row.queries.position],
        )
        chosen, start = {}, 0
        for grid in row.grids:
            count, length, _ = grid.shape
            span, start = slice(start, start + count * length), start + count * length
            if max(grid.lengths) > sizes.topk:
                parts = (part[span].unflatten(0, (count, length)) for part in (query, key, weights))
                chosen[id(grid)] = _choose(*parts, lengths=grid.lengths, sizes=sizes)
        return chosen

    def _rotate(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        """x [S, heads, head_dim]; its first dims turn."""
        turned, plain = x.split([self.rotated, self.sizes.head_dim - self.rotated], dim=-1)
        return torch.cat([rotate(turned, angles), plain], dim=-1)


def _choose(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    *,
    lengths: list[int],
    sizes: Sizes,
) -> torch.Tensor:
    """[N, Q, heads, d], [N, Q, d], [N, Q, heads] -> [N, 1, Q, Q] bool. One sequence at a time: the
    scores of all heads are held, and what is chosen among equals must not depend on the sequences
    beside it."""
    longest = query.shape[1]
    causal = torch.ones(longest, longest, dtype=torch.bool, device=query.device).tril()
    visible = causal.repeat(len(query), 1, 1, 1)
    for number, length in enumerate(lengths):
        if length <= sizes.topk:
            continue
        q, k, w = (part[number, :length] for part in (query, key, weights))
        # [Q, heads, K]
        logits = (q.float() @ k.float().T).mul_(sizes.head_dim**-0.5).relu_()
        scores = (
            (w.unsqueeze(1) @ logits)
            .squeeze(1)
            .masked_fill_(~causal[:length, :length], float("-inf"))
        )
        best = torch.zeros_like(scores, dtype=torch.bool).scatter_(
            -1, scores.topk(sizes.topk, dim=-1).indices, True
        )
        visible[number, 0, :length, :length] &= best
    return visible
