"""Compressed attention of DeepSeek-V4 (its report, section 2.3) over packed rows. Within a window
there is one key per position, which is its value too; beyond the window each entry stands for
several positions, and a query attends to all entries or to those that an indexer chooses. Also the
layer around it, the first of which choose experts by the token's id. Used by `specs`.

The indexer is trained as in `dsa`: by the loss of `indexer_loss`, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from milescli.backends.megatron.layers.attention import Grid, PackedRow
from milescli.backends.megatron.layers.blockwise import attend
from milescli.backends.megatron.layers.experts import Projection, Router
from milescli.backends.megatron.layers.hyper import HyperLayer
from milescli.backends.megatron.layers.indexer_loss import (
    IndexerComparison,
    RowLoss,
    Scores,
    with_loss,
)
from milescli.backends.megatron.layers.norm import RmsNorm
from milescli.backends.megatron.layers.rope import Angles, angles, rotate
from milescli.models.facts import ModelFacts

_QUERIES = 128
"""Queries that are computed at a time."""


def options(facts: ModelFacts) -> dict[str, object]:
    """Return Megatron's settings: layers that differ are saved separately."""
    return {"hetereogenous_dist_checkpoint": True} if facts.compressed else {}


def adapt(spec: ModuleSpec, facts: ModelFacts, *, layer: int) -> ModuleSpec:
    """Adapt Megatron's spec of a layer with experts to layer `layer` (from 0)."""
    parts = spec.submodules
    own = {"facts": facts, "layer": layer}
    # the mask's type is for Megatron's MTP layer, which asks for it
    mask = {"attn_mask_type": parts.self_attention.params["attn_mask_type"]}
    parts.self_attention = ModuleSpec(module=CompressedAttention, params={**own, **mask})
    if facts.layers[layer].hash_routing:
        parts.mlp.submodules.router = partial(HashRouter, facts=facts)
    # norms lie in checkpoints under their own names
    parts.sharded_state_dict_keys_map = {}
    return ModuleSpec(module=CompressedLayer, submodules=parts, params=own)


class HashRouter(Router):
    """Sends each token to the experts in its row of a table; the scores only weight them. No routes
    need to be replayed."""

    def __init__(self, config, pg_collection=None, *, facts: ModelFacts) -> None:
        """Called by Megatron's MoE layer."""
        super().__init__(config, pg_collection, facts=replace(facts, router_bias=False))
        if self.router_replay is not None:
            RouterReplay.global_router_replay_instances.remove(self.router_replay)
            self.router_replay = None
        like = {"dtype": torch.int64, "device": torch.cuda.current_device()}
        self.register_buffer("tid2eid", torch.zeros(facts.vocab_size, facts.topk, **like))
        self.tokens: torch.Tensor | None = None
        """[S] ids of the tokens that it is about to route."""

    def _choose(self, wanted, topk, num_groups=None, group_topk=None):
        assert self.tokens is not None, "the layer says which tokens there are"
        chosen = self.tid2eid[self.tokens]
        return wanted.gather(1, chosen), chosen


class CompressedLayer(HyperLayer):
    """Passes the row's tokens to a HashRouter."""

    def forward(self, hidden_states, attention_mask=None, context=None, **options):
        """Return the streams and `context`. Called by Megatron."""
        row, router = options["packed_seq_params"], self.mlp.router
        if isinstance(router, HashRouter):
            assert row.tokens is not None, "rows of this family hold their tokens"
            # the part of this rank under sequence parallelism
            parts = row.tokens.split(len(hidden_states))
            router.tokens = parts[self.tp_group.rank() if len(parts) > 1 else 0]
        return super().forward(hidden_states, attention_mask, context, **options)


class GroupedProjection(torch.nn.Module):
    """Projects each group of heads by a matrix of its own: [S, groups * width] -> [S, groups *
    rank]. Tensor parallelism cuts groups."""

    def __init__(self, config, *, groups: int, width: int, rank: int) -> None:
        """`groups` are those of this rank."""
        super().__init__()
        self.groups = groups
        self.weight = torch.nn.Parameter(
            torch.empty(groups * rank, width, dtype=config.params_dtype)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the projections of all groups, side by side."""
        weight = self.weight.unflatten(0, (self.groups, -1))
        return torch.einsum("sgd,grd->sgr", x.unflatten(-1, (self.groups, -1)), weight).flatten(1)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Return the weight, cut by groups."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets
        )


def _rotate_last(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotate the last dims of x [S, heads, d]."""
    plain = x.shape[-1] - 2 * angles.cos.shape[-1]
    return torch.cat([x[..., :plain], rotate(x[..., plain:].contiguous(), angles)], dim=-1)


def _unit(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise x over its last dim, without a weight."""
    return x * (x.float().square().mean(dim=-1, keepdim=True) + eps).rsqrt().to(x.dtype)


class Compressor(MegatronModule):
    """Makes one entry of every `rate` positions, by a softmax over them in each channel. With
    `width` 2, the `rate` positions before take part too, with a series of their own."""

    def __init__(self, config, facts: ModelFacts, *, head_dim: int, rate: int, width: int) -> None:
        super().__init__(config)
        assert facts.compressed is not None and facts.rope is not None
        self.rate, self.width = rate, width
        self.rope, self.rotated = replace(facts.rope, share=1.0), facts.compressed.rope_head_dim
        self.linear_kv, self.linear_gate = (
            Projection(facts.hidden_size, width * head_dim, config=config) for _ in range(2)
        )
        made = {"dtype": torch.float32, "device": torch.cuda.current_device()}
        self.position_bias = torch.nn.Parameter(torch.zeros(rate, width * head_dim, **made))
        self.position_bias.sequence_parallel = config.sequence_parallel
        self.norm = RmsNorm(config, head_dim, eps=facts.norm_eps)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return values and gates of hidden states, concatenated, [S, 1, 2 * width * head_dim]."""
        return torch.cat([self.linear_kv(x)[0], self.linear_gate(x)[0]], dim=-1)

    def forward(self, projected: torch.Tensor) -> torch.Tensor:
        """Compress [N, Q, 2 * width * head_dim] to entries [N, Q // rate, head_dim]."""
        count = projected.shape[1] // self.rate
        if not count:
            return projected.new_zeros(len(projected), 0, self.norm.weight.shape[0])
        windows = projected[:, : count * self.rate].unflatten(1, (count, self.rate))
        value, gate = windows.chunk(2, dim=-1)
        gate = gate.float() + self.position_bias
        if self.width == 2:
            value, gate = self._with_before(value, 0.0), self._with_before(gate, -torch.inf)
        entries = self.norm((value * gate.softmax(dim=2).to(value.dtype)).sum(dim=2))
        places = torch.arange(count) * self.rate
        turns = angles(self.rope, places, head_dim=self.rotated, device=entries.device)
        return _rotate_last(entries.transpose(0, 1), turns).transpose(0, 1)

    @staticmethod
    def _with_before(x: torch.Tensor, fill: float) -> torch.Tensor:
        """Return [N, windows, 2 * rate, d] of [N, windows, rate, 2 * d]: the first series of the
        previous window, then the second series of the window itself; `fill` stands before the first
        window."""
        before, own = x.chunk(2, dim=-1)
        return torch.cat([F.pad(before, (0, 0, 0, 0, 1, 0), value=fill)[:, :-1], own], dim=2)


class Indexer(MegatronModule):
    """Scores entries with a few narrow heads: sum over heads of weight * relu(q . k)."""

    def __init__(self, config, facts: ModelFacts) -> None:
        """Build the whole indexer on every tensor-parallel rank."""
        super().__init__(config)
        assert facts.indexer is not None and facts.compressed is not None
        self.sizes = facts.indexer
        heads, dim = self.sizes.num_heads, self.sizes.head_dim
        self.linear_wq_b = Projection(facts.compressed.q_lora_rank, heads * dim, config=config)
        self.linear_weights_proj = Projection(facts.hidden_size, heads, config=config)
        self.compressor = Compressor(
            config, facts, head_dim=dim, rate=facts.compressed.sparse_rate, width=2
        )
        self.requires_grad_(self.sizes.trained)
        for weight in (self.compressor.position_bias, self.compressor.norm.weight):
            # all ranks compress all positions, and learn alike from them
            weight.sequence_parallel = False

    def project(self, x: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the choice at each position, concatenated: the compressor's
        projections, the weights of heads, queries. x [S, 1, hidden], latent [S, 1, q_lora_rank]."""
        query, weights = self.linear_wq_b(latent)[0], self.linear_weights_proj(x)[0]
        return torch.cat([self.compressor.project(x), weights, query], dim=-1)

    def turn(self, projected: torch.Tensor, turns: Angles) -> torch.Tensor:
        """Return projections [S, ...] with their queries rotated."""
        rest, query = self._split(projected)
        query = query.unflatten(-1, (self.sizes.num_heads, -1))
        return torch.cat([rest, _rotate_last(query, turns).flatten(1)], dim=-1)

    def chooses(self, lengths: list[int]) -> bool:
        """Return True unless every query sees all entries before it."""
        return max(lengths) // self.compressor.rate > self.sizes.topk

    def forward(self, projected: torch.Tensor) -> Scores:
        """Return the inputs of the entries' scores, of rotated projections [N, Q, ...]."""
        heads, (rest, query) = self.sizes.num_heads, self._split(projected)
        to_compress, weights = rest[..., :-heads], rest[..., -heads:].float() * heads**-0.5
        return query.unflatten(-1, (heads, -1)), self.compressor(to_compress), weights

    @torch.no_grad()
    def choose(self, scores: Scores, *, lengths: list[int]) -> torch.Tensor:
        """Choose entries, [N, 1, 1, Q, entries] bool, one sequence at a time: the choice among
        equal scores must not depend on the other sequences."""
        (query, key, weights), rate = scores, self.compressor.rate
        dim = self.sizes.head_dim
        size = (len(key), 1, 1, query.shape[1], key.shape[1])
        seen = torch.ones(size, dtype=torch.bool, device=key.device)
        for number, length in enumerate(lengths):
            count = length // rate
            if count <= self.sizes.topk:
                continue
            for first in range(0, length, _QUERIES):
                last = min(first + _QUERIES, length)
                q = query[number, first:last]
                logits = F.relu(q.float() @ key[number, :count].float().T) * dim**-0.5
                scores = (logits * weights[number, first:last, :, None]).sum(dim=1)
                at = torch.arange(first, last, device=key.device)[:, None]
                late = torch.arange(count, device=key.device) >= (at + 1) // rate
                best = scores.masked_fill_(late, -torch.inf).topk(self.sizes.topk, dim=-1).indices
                chosen = torch.zeros_like(late).scatter_(1, best, True)
                seen[number, 0, 0, first:last, :count] = chosen
        return seen

    def _split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (compressor's projections and weights of heads, queries)."""
        queries = self.sizes.num_heads * self.sizes.head_dim
        return projected[..., :-queries], projected[..., -queries:]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryBlock:
    """Holds queries number first .. last of every sequence of a grid and what any of them sees.
    Keys are all positions, then all entries. Used like `blockwise.Block` by `attend`."""

    queries: slice
    keys: torch.Tensor
    """[keys] positions of the window, then num_keys + entry"""
    num_window: int
    window: int
    rate: int
    """Positions per entry; 0: there are no entries."""
    chosen: torch.Tensor | None
    """[N, 1, 1, Q, entries] bool, or None for all that are complete."""

    def hidden(self) -> torch.Tensor:
        """Return the mask [N or 1, 1, 1, queries, keys] bool, True where a query does not see the
        key."""
        at = torch.arange(self.queries.start, self.queries.stop, device=self.keys.device)[:, None]
        positions = self.keys[: self.num_window]
        hidden = ((positions > at) | (positions <= at - self.window))[None, None, None]
        count = len(self.keys) - self.num_window
        if not count:
            return hidden
        late = (torch.arange(count, device=at.device) >= (at + 1) // self.rate)[None, None, None]
        if self.chosen is not None:
            late = late | ~self.chosen[..., self.queries, :count]
        return torch.cat([hidden.expand(len(late), -1, -1, -1, -1), late], dim=-1)


class _Core(MegatronModule):
    """Combines queries with keys of the window and entries."""

    def __init__(self, config, facts: ModelFacts, *, layer: int, tp_group) -> None:
        super().__init__(config)
        self.tp_group = tp_group
        sizes, kind = facts.compressed, facts.layers[layer].compression
        assert sizes is not None
        self.window, self.scale = facts.sliding_window, facts.head_dim**-0.5
        self.softmax_offset = torch.nn.Parameter(
            torch.zeros(
                facts.num_heads // tp_group.size(),
                dtype=torch.float32,
                device=torch.cuda.current_device(),
            )
        )
        self.compressor = self.indexer = None
        if kind != "none":
            rate, width = {"sparse": (sizes.sparse_rate, 2), "heavy": (sizes.heavy_rate, 1)}[kind]
            self.compressor = Compressor(
                config, facts, head_dim=facts.head_dim, rate=rate, width=width
            )
        if kind == "sparse":
            self.indexer = Indexer(config, facts)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Return the sinks, cut by heads, and the other weights, which every rank has."""
        return super().sharded_state_dict(
            prefix, sharded_offsets, metadata
        ) | make_sharded_tensors_for_checkpoint(
            {"softmax_offset": self.softmax_offset}, prefix, {"softmax_offset": 0}, sharded_offsets
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        to_compress: torch.Tensor | None,
        to_choose: torch.Tensor | None,
        *,
        grid: Grid,
        loss: RowLoss | None,
        shares: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return [N, Q, heads, d], the attention of queries [N, Q, heads, d] to keys [N, Q, d].
        `to_compress` and `to_choose`: projections of the compressor and of the indexer, [N, Q,
        ...]."""
        length, chosen = grid.shape[1], None
        scores: Scores | None = None
        if self.compressor is not None:
            key = torch.cat([key, self.compressor(to_compress)], dim=1)
        if self.indexer is not None:
            chooses = self.indexer.chooses(grid.lengths)
            if chooses or loss is not None:
                scores = self.indexer(to_choose)
            chosen = self.indexer.choose(scores, lengths=grid.lengths) if chooses else None
        block = partial(self._block, length=length, chosen=chosen, device=key.device)
        ends = [*range(_QUERIES, length, _QUERIES), length]
        blocks = [block(slice(first, last)) for first, last in zip([0, *ends], ends, strict=False)]
        heads = key[:, :, None]
        out = attend(
            query, heads, heads, self.softmax_offset, blocks=blocks, scale=self.scale, softcap=None
        )
        if scores is None or loss is None or not (scores[1].shape[1] and torch.is_grad_enabled()):
            return out
        lesson = IndexerComparison(
            shares=shares,
            num_heads=query.shape[2],
            lengths=grid.lengths,
            attention=partial(self._attention, query.detach(), key.detach(), block),
            tp_group=self.tp_group,
        )
        return with_loss(out, [scores], lambda given: lesson.learn(*given, loss))

    def _block(
        self, at: slice, *, length: int, chosen: torch.Tensor | None, device: torch.device
    ) -> EntryBlock:
        """Return the block of the queries `at` of sequences of `length` positions."""
        rate = self.compressor.rate if self.compressor is not None else 0
        positions = torch.arange(max(at.start - self.window + 1, 0), at.stop, device=device)
        entries = torch.arange(at.stop // rate if rate else 0, device=device) + length
        return EntryBlock(
            queries=at,
            keys=torch.cat([positions, entries]),
            num_window=len(positions),
            window=self.window,
            rate=rate,
            chosen=chosen,
        )

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        block_of: Callable[[slice], EntryBlock],
        number: int,
        at: slice,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute `IndexerComparison.attention` from queries [N, Q, heads, d] and all keys, of
        positions and then of entries."""
        block = block_of(at)
        hidden = block.hidden()
        hidden = hidden[number if len(hidden) > 1 else 0, 0, 0]
        q, k = query[number, at].transpose(0, 1).float(), key[number, block.keys].float()
        logits = (q @ k.T).mul_(self.scale).masked_fill_(hidden, -torch.inf)
        sinks = self.softmax_offset.detach().view(-1, 1, 1).expand(-1, logits.shape[1], -1)
        weights = torch.cat([logits, sinks], dim=-1).softmax(dim=-1)[..., block.num_window : -1]
        return weights.sum(dim=0), ~hidden[:, block.num_window :]


class CompressedAttention(MegatronModule):
    """Implements the attention of one layer: hidden states [S / tp or S, 1, hidden] -> the same
    shape, and no bias. Tensor parallelism cuts heads, and the groups of the output projection; the
    key, the compressor and the indexer are small, and whole on every rank."""

    def __init__(
        self,
        config,
        layer_number=None,
        cp_comm_type=None,
        pg_collection=None,
        attn_mask_type=None,
        *,
        facts: ModelFacts,
        layer: int,
    ) -> None:
        """Called by Megatron; the last three come from the layer spec."""
        super().__init__(config)
        sizes = facts.compressed
        assert sizes is not None, facts.family
        self.tp_group = pg_collection.tp
        tp, head_dim = self.tp_group.size(), facts.head_dim
        self.head_dim, self.eps = head_dim, facts.norm_eps
        self.scattered = config.sequence_parallel and tp > 1
        self.angles = "window" if facts.layers[layer].compression == "none" else "entries"
        linear = {"config": config, "init_method": config.init_method, "bias": False}
        width = facts.num_heads * head_dim
        self.linear_q_down_proj = Projection(facts.hidden_size, sizes.q_lora_rank, config=config)
        self.q_layernorm = RmsNorm(config, sizes.q_lora_rank, eps=facts.norm_eps)
        self.linear_q_up_proj = ColumnParallelLinear(
            sizes.q_lora_rank, width, gather_output=False, tp_group=self.tp_group, **linear
        )
        self.linear_kv_proj = Projection(facts.hidden_size, head_dim, config=config)
        self.kv_layernorm = RmsNorm(config, head_dim, eps=facts.norm_eps)
        self.core_attention = _Core(config, facts, layer=layer, tp_group=self.tp_group)
        self.linear_grouped_proj = GroupedProjection(
            config,
            groups=sizes.output_groups // tp,
            width=width // sizes.output_groups,
            rank=sizes.output_rank,
        )
        self.linear_proj = RowParallelLinear(
            sizes.output_groups * sizes.output_rank,
            facts.hidden_size,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp_group,
            **linear,
        )

    def forward(self, hidden_states, attention_mask=None, *, packed_seq_params=None, **_):
        """Attend within each sequence of the row. Called by the layer."""
        row, core = packed_seq_params, self.core_attention
        assert isinstance(row, PackedRow), "this attention computes packed rows only"
        assert row.queries is not None
        turns = row.angles[self.angles]
        latent = self.q_layernorm(self.linear_q_down_proj(hidden_states)[0])
        query = self.linear_q_up_proj(latent)[0].squeeze(1).unflatten(-1, (-1, self.head_dim))
        query = _rotate_last(_unit(query, self.eps), turns)
        key = self._whole(self.kv_layernorm(self.linear_kv_proj(hidden_states)[0]))
        key = _rotate_last(key, turns).squeeze(1)
        parts: list[torch.Tensor | None] = [query, key, None, None]
        if core.compressor is not None:
            parts[2] = self._whole(core.compressor.project(hidden_states)).squeeze(1)
        loss = row.indexer_loss if core.indexer is not None and core.indexer.sizes.trained else None
        if core.indexer is not None:
            with nullcontext() if loss is not None else torch.no_grad():
                choice = core.indexer.project(hidden_states.detach(), latent.detach())
                # the ranks learn alike from all positions
                choice = self._whole(choice, sums_gradients=False).squeeze(1)
                parts[3] = core.indexer.turn(choice, turns)
        parts.append(None if loss is None else loss.shares)
        filled = [part if part is None else row.queries.fill(part) for part in parts]
        out, start = [], 0
        for grid in row.grids:
            count, length, _ = grid.shape
            at, start = slice(start, start + count * length), start + count * length
            *own, shares = (
                part if part is None else part[at].unflatten(0, (count, -1)) for part in filled
            )
            out.append(core(*own, grid=grid, loss=loss, shares=shares).flatten(0, 1))
        attended = row.queries.empty(torch.cat(out))
        back = _rotate_last(attended, replace(turns, sin=-turns.sin))
        return self.linear_proj(self.linear_grouped_proj(back.flatten(1))[:, None])

    def _whole(self, x: torch.Tensor, *, sums_gradients: bool = True) -> torch.Tensor:
        """Gather [S / tp, 1, d] -> [S, 1, d] under sequence parallelism. The gradient is summed
        over the ranks if these have different heads."""
        if not self.scattered:
            return x
        return gather_from_sequence_parallel_region(
            x, tensor_parallel_output_grad=sums_gradients, group=self.tp_group
        )
