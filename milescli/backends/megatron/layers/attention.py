"""Attention in plain PyTorch for Megatron's layer spec: rotary embedding and causal attention over
a row of packed sequences, with context parallelism. Used wherever TransformerEngine is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.backends import cuda

from milescli.backends.megatron.cpu.kernels import attend as attend_short
from milescli.backends.megatron.cpu.kernels import is_for
from milescli.backends.megatron.layers.blockwise import Block, attend, make_blocks
from milescli.backends.megatron.layers.chunks import Cells, Chunks, make_chunks
from milescli.backends.megatron.layers.indexer_loss import RowLoss
from milescli.backends.megatron.layers.rope import Angles, angles, rotate
from milescli.backends.megatron.step.rows import RowLayout, RowShape, zigzag
from milescli.core.types import ImageSpan
from milescli.models.facts import ModelFacts

_LENGTH_SPREAD = 0.7
"""Sequences share a grid while the shortest is at least this share of the longest."""
_SHORT = 24
"""Sequences up to this length share a grid in any case."""


def options(facts: ModelFacts) -> dict[str, object]:
    """Return Megatron's settings of windows, sinks, gate and scale. The windows are for its own
    modules, which may load the same checkpoint; this package's modules take them from the layer
    spec."""
    settings: dict[str, object] = {}
    if facts.attention_output_gate:
        settings["attention_output_gate"] = True
    if facts.attention_scale is not None:
        settings["softmax_scale"] = facts.attention_scale
    if facts.attention_sinks:
        settings["softmax_type"] = "learnable"
    if any(layer.mixer == "sliding" for layer in facts.layers):
        settings["window_size"] = (facts.sliding_window - 1, 0)
        settings["window_attn_skip_freq"] = [
            int(layer.mixer == "sliding") for layer in facts.layers
        ]
    return settings


@dataclass(slots=True, kw_only=True)
class Grid:
    """Arranges sequences of similar length as a rectangle, so that one kernel call computes them
    all. N: sequences, Q: local queries, K: keys."""

    shape: tuple[int, int, int]
    """(N, Q, K)"""
    is_causal: bool
    """True if query i sees the keys up to i: no context parallelism."""
    mask: torch.Tensor | None
    """[N, 1, Q, K] bool, True where a query sees a key, if attention is not plainly causal; only on
    a CPU, whose kernel accepts a mask."""
    places: np.ndarray
    """[N, Q] place in its sequence of each query"""
    lengths: list[int]
    """[N] of the sequences, padding included"""
    device: torch.device
    together: tuple[np.ndarray, np.ndarray] | None = None
    """First and last place [N, Q] of the image to which a query's token belongs; for text the
    query's own place. None if no token sees later ones."""
    _blocks: dict[int, list[Block]] = field(default_factory=dict)

    def blocks(self, window: int) -> list[Block]:
        """Return the blocks of attention that is not plain, made on first use. `window` 0 means all
        positions."""
        if window >= self.shape[2]:
            window = 0
        if window not in self._blocks:
            self._blocks[window] = make_blocks(
                self.places,
                num_keys=self.shape[2],
                window=window,
                device=self.device,
                together=self.together,
            )
        return self._blocks[window]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPositions:
    """Lays sequences that share positions of a row end to end, each as a whole."""

    cells: Cells
    """[all positions of the sequences]; cells of queries that another sequence computes are never
    read."""
    skips: torch.Tensor
    """[sequences] int32, the number of such positions at the beginning of each."""


@dataclass
class PackedRow(PackedSeqParams):
    """Holds what attention needs of a packed row. Megatron passes it to every attention layer
    unchanged."""

    angles: dict[str, Angles] = field(default_factory=dict)
    """Angles by kind of layer: full, sliding, mla, or those of `compressed`; empty if positions are
    not embedded."""
    grids: list[Grid] = field(default_factory=list)
    queries: Cells | None = None
    """Cells of the S positions of this rank."""
    keys: Cells | None = None
    """Cells of the F positions of the whole row, in the order in which the ranks' parts are
    gathered."""
    shared: SharedPositions | None = None
    """Set if sequences share positions of the row. Only this and the cells then describe each
    sequence as a whole."""
    chunks: Chunks | None = None
    """The same row in chunks, for layers with a recurrence; None if there are none."""
    chosen: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    """Chosen positions by layer, for sparse attention whose layers share a choice: filled and read
    by `dsa`."""
    indexer_loss: RowLoss | None = None
    """In an update that trains the indexers of sparse attention."""
    tokens: torch.Tensor | None = None
    """[S] int64 token ids, for layers that choose experts by them; None if there are none."""


def pack_row(
    row: RowLayout,
    *,
    shape: RowShape,
    facts: ModelFacts,
    device: torch.device,
    tokens: torch.Tensor | None = None,
    rotary: torch.Tensor | None = None,
    images: Sequence[Sequence[ImageSpan]] = (),
) -> PackedRow:
    """Return everything about a row that all layers share. `tokens`: ids [S] at the positions of
    this rank; `rotary` [3, S]: positions of M-RoPE, None: those of text; `images`: those of each
    sequence that is not empty."""
    cu = torch.tensor(row.cu_seqlens, dtype=torch.int32, device=device)
    padded = torch.tensor(row.cu_seqlens_padded, dtype=torch.int32, device=device)
    lengths = np.diff(row.cu_seqlens_padded)
    members = _group_lengths(lengths)
    spans = images if facts.vision is not None and facts.vision.mutual and any(images) else ()
    grids = [_grid(lengths[which], shape=shape, device=device) for which in members]
    for grid, which in zip(grids, members, strict=True):
        own = [spans[number] if number < len(spans) else () for number in which.tolist()]
        grid.together = _together(grid.places, own) if any(own) else None
    order, shared = _gathered_order(lengths, cp=shape.cp), None
    if row.shared is not None and row.skips is not None:
        order = row.shared.numpy()
        whole = [np.array([number]) for number in range(len(lengths))]
        cells = _cells(lengths, whole, order=order, device=device, sums=True)
        shared = SharedPositions(cells=cells, skips=row.skips.to(device))
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=int(lengths.max()),
        max_seqlen_kv=int(lengths.max()),
        angles=_angles(facts, row.positions if rotary is None else rotary, device=device),
        grids=grids,
        queries=_cells(
            lengths // shape.cp, members, order=order if shared else None, device=device
        ),
        keys=_cells(lengths, members, order=order, device=device, sums=shared is not None),
        shared=shared,
        chunks=make_chunks(lengths, order=order, device=device) if facts.gated_delta else None,
        tokens=tokens if any(layer.hash_routing for layer in facts.layers) else None,
    )


def _angles(
    facts: ModelFacts, positions: torch.Tensor, *, device: torch.device
) -> dict[str, Angles]:
    """Return one set of angles per kind of layer that attends."""
    if facts.compressed is not None:
        assert facts.rope is not None and facts.rope_sliding is not None
        return {
            name: angles(
                replace(rope, share=1.0),
                positions,
                head_dim=facts.compressed.rope_head_dim,
                device=device,
            )
            for name, rope in (("window", facts.rope_sliding), ("entries", facts.rope))
        }
    by_mixer: dict[str, Angles] = {}
    for number, layer in enumerate(facts.layers):
        rope = facts.rope_sliding if layer.mixer == "sliding" and facts.rope_sliding else facts.rope
        if (
            rope is None
            or layer.unrotated
            or layer.mixer in by_mixer
            or layer.mixer not in ("full", "sliding", "mla")
        ):
            continue
        head_dim = (
            facts.mla.qk_rope_head_dim
            if layer.mixer == "mla" and facts.mla
            else facts.at(number).head_dim
        )
        by_mixer[layer.mixer] = angles(rope, positions, head_dim=head_dim, device=device)
    return by_mixer


def _group_lengths(lengths: np.ndarray) -> list[np.ndarray]:
    """Group sequence numbers by grid: alike in length, ascending within a grid."""
    order = np.argsort(-lengths, kind="stable")
    groups: list[list[int]] = []
    longest = 0
    for number in order.tolist():
        length = int(lengths[number])
        if not groups or (length < _LENGTH_SPREAD * longest and longest > _SHORT):
            groups.append([])
            longest = length
        groups[-1].append(number)
    return [np.array(sorted(group)) for group in groups]


def _grid(lengths: np.ndarray, *, shape: RowShape, device: torch.device) -> Grid:
    num_sequences, num_keys = len(lengths), int(lengths.max())
    if shape.cp == 1:
        every = np.broadcast_to(np.arange(num_keys), (num_sequences, num_keys))
        return Grid(
            shape=(num_sequences, num_keys, num_keys),
            is_causal=True,
            mask=None,
            places=every,
            lengths=lengths.tolist(),
            device=device,
        )
    num_queries = num_keys // shape.cp
    seen_to = np.zeros((num_sequences, num_queries), np.int64)
    for number, length in enumerate(lengths.tolist()):
        places = zigzag([length], cp=shape.cp, cp_rank=shape.cp_rank)
        seen_to[number, : len(places)] = places
    mask = None
    if device.type == "cpu":
        mask = torch.from_numpy(seen_to[:, :, None] >= np.arange(num_keys)[None, None, :])[:, None]
    return Grid(
        shape=(num_sequences, num_queries, num_keys),
        is_causal=False,
        mask=mask,
        places=seen_to,
        lengths=lengths.tolist(),
        device=device,
    )


def _together(
    places: np.ndarray, images: Sequence[Sequence[ImageSpan]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return [N, Q] the first and last place of the image that contains each query, or the query's
    own place."""
    first, last = places.copy(), places.copy()
    for number, spans in enumerate(images):
        for span in spans:
            end = span.start + span.num_tokens
            within = (places[number] >= span.start) & (places[number] < end)
            first[number, within], last[number, within] = span.start, end - 1
    return first, last


def _gathered_order(lengths: np.ndarray, *, cp: int) -> np.ndarray | None:
    """Return [F] the place of each position of the whole row after the ranks' parts are gathered;
    None if no position moves."""
    if cp == 1:
        return None
    gathered = np.concatenate([zigzag(lengths.tolist(), cp=cp, cp_rank=rank) for rank in range(cp)])
    order = np.empty_like(gathered)
    order[gathered] = np.arange(len(gathered))
    return order


def _cells(
    lengths: np.ndarray,
    members: list[np.ndarray],
    *,
    order: np.ndarray | None,
    device: torch.device,
    sums: bool = False,
) -> Cells:
    """Return the cells of the sequences `members`. `sums`: a position may have several cells that
    are read."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    parts, filled = [], []
    for which in members:
        place = np.arange(int(lengths[which].max()))[None, :]
        real = place < lengths[which][:, None]
        parts.append(np.where(real, starts[which][:, None] + place, 0).reshape(-1))
        filled.append(real.reshape(-1))
    position, real = np.concatenate(parts), np.concatenate(filled)
    if order is not None:
        position = order[position]
    cells = np.flatnonzero(real)
    by_position = cells[np.argsort(position[cells], kind="stable")]
    _, begins = np.unique(position[by_position], return_index=True)
    cell = by_position[begins]
    trivial = len(position) == len(cell) and bool((position == np.arange(len(cell))).all())
    holes = np.delete(np.arange(len(position)), cell)
    tensors = [
        torch.from_numpy(array).to(device) for array in (position, cell, holes, by_position, begins)
    ]
    return Cells(
        position=tensors[0],
        cell=tensors[1],
        holes=tensors[2],
        trivial=trivial,
        bags=(tensors[3], tensors[4]) if sums else None,
    )


class _GatherKeys(torch.autograd.Function):
    """Gathers [S, ...] of every context-parallel rank to [F, ...], rank after rank; the gradient is
    summed and scattered back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = torch.empty((group.size() * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        size = ctx.group.size()
        out = torch.empty(
            (grad.shape[0] // size, *grad.shape[1:]), dtype=grad.dtype, device=grad.device
        )
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


def avoid_cudnn() -> None:
    """Make PyTorch use its other attention kernels in this process. cuDNN's kernel, which PyTorch
    prefers on Hopper and Blackwell, plans each new shape for about half a second (measured
    elsewhere: modelscope/FunASR issue 3704), and rows of packed sequences have new shapes at every
    step."""
    cuda.enable_cudnn_sdp(False)


def has_kernel(query: torch.Tensor, key: torch.Tensor, *, grid: Grid) -> bool:
    """Return True if one of PyTorch's kernels computes [N, Q, heads, d] over [N, K, groups, d]
    without materialising all logits. On a device none supports a mask, float32 with grouped heads,
    or wide heads: PyTorch would use its plain implementation, with [N, heads, Q, K] in memory."""
    if query.device.type == "cpu":
        return True
    if not grid.is_causal:
        return False
    q, k = query.transpose(1, 2), key.transpose(1, 2)
    given = cuda.SDPAParams(q, k, k, None, 0.0, True, query.shape[2] != key.shape[2])
    return cuda.can_use_flash_attention(given) or cuda.can_use_efficient_attention(given)


class PackedAttention(MegatronModule):
    """Implements the core attention of Megatron's layer spec: queries [S, heads, d], keys [S,
    groups, d] and values [S, groups, v] -> [S, heads * v]. With `softmax_type: learnable` it has
    the sinks, under Megatron's name."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        k_channels=None,
        v_channels=None,
        cp_comm_type=None,
        pg_collection=None,
        *,
        kind: str = "full",
        window: int = 0,
        softcap: float | None = None,
    ) -> None:
        """Called by Megatron; the last three come from the layer spec. `kind` is full, sliding,
        unrotated, or mla, whose caller has applied the rotary embedding; `window` is the number of
        positions that a query sees, including its own, 0 for all; `softcap` applies to the
        logits."""
        super().__init__(config=config)
        self.kind, self.window, self.softcap = kind, window, softcap
        self.cp_group, self.tp_group = pg_collection.cp, pg_collection.tp
        self.scale = (
            (k_channels or config.kv_channels) ** -0.5 if softmax_scale is None else softmax_scale
        )
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self.tp_group.size()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Return the sinks, cut by heads."""
        tensors = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            tensors, prefix, {"softmax_offset": 0}, sharded_offsets
        )

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: PackedRow | None = None,
    ) -> torch.Tensor:
        row = packed_seq_params
        assert isinstance(row, PackedRow), "this attention computes packed rows only"
        assert row.queries is not None and row.keys is not None
        if self.kind != "mla" and (angles := row.angles.get(self.kind)):
            query, key = rotate(query, angles), rotate(key, angles)
        if self.cp_group.size() > 1:
            key, value = (
                _GatherKeys.apply(key, self.cp_group),
                _GatherKeys.apply(value, self.cp_group),
            )
        longest = row.max_seqlen_q
        whole = self.cp_group.size() == 1 and self._is_plain(query, value, longest)
        whole = whole and all(grid.together is None for grid in row.grids)
        starts = row.cu_seqlens_q_padded
        if whole and row.shared and is_for(query, longest, skips=True):
            cells, skips = row.shared.cells, row.shared.skips
            parts = (cells.gather(query), cells.fill(key), cells.fill(value))
            attended = attend_short(*parts, starts, longest, self.scale, skips)
            return cells.empty(attended).flatten(1)
        if whole and not row.shared and is_for(query, longest):
            attended = attend_short(query, key, value, starts, longest, self.scale)
            return attended.flatten(1)
        query, key, value = row.queries.fill(query), row.keys.fill(key), row.keys.fill(value)
        parts = []
        query_start = key_start = 0
        for grid in row.grids:
            count, queries, keys = grid.shape
            part = self._attend(
                query[query_start : query_start + count * queries].unflatten(0, (count, queries)),
                key[key_start : key_start + count * keys].unflatten(0, (count, keys)),
                value[key_start : key_start + count * keys].unflatten(0, (count, keys)),
                grid=grid,
            )
            parts.append(part.flatten(0, 1))
            query_start, key_start = query_start + count * queries, key_start + count * keys
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return row.queries.empty(out).flatten(1)

    def _is_plain(self, query, value, longest: int) -> bool:
        """Return True if every position sees all earlier ones, with a plain softmax."""
        windowed = 0 < self.window < longest
        more = self.softmax_offset is not None or self.softcap
        return not (windowed or more or query.shape[-1] != value.shape[-1])

    def _attend(self, query, key, value, *, grid: Grid) -> torch.Tensor:
        """Return attention of a grid: [N, Q, heads, d], [N, K, groups, d] and [N, K, groups, v] ->
        [N, Q, heads, v]."""
        is_plain = self._is_plain(query, value, grid.shape[2]) and grid.together is None
        if not (is_plain and has_kernel(query, key, grid=grid)):
            blocks = grid.blocks(self.window)
            return attend(
                query,
                key,
                value,
                self.softmax_offset,
                blocks=blocks,
                scale=self.scale,
                softcap=self.softcap,
            )
        if grid.is_causal and is_for(query, longest := query.shape[1]):
            flat = (x.flatten(0, 1) for x in (query, key, value))
            starts = torch.arange(0, len(query) * longest + 1, longest, dtype=torch.int32)
            attended = attend_short(*flat, starts, longest, self.scale)
            return attended.view(query.shape)
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=grid.mask,
            is_causal=grid.is_causal,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.transpose(1, 2)
