"""Activation memory: the bytes per token that autograd saves of a layer for its backward pass. The
formulas come from reading the modules of `backends.megatron` tensor by tensor, and tests compare
them with the memory of a trainer rank. Pure.

Letters: h hidden_size, b bytes of the model's dtype (terms without b are float32), r the share of
the residual stream that a rank saves: 1 / tp under sequence parallelism, else 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from milescli.models.adapter import base_name, is_shared
from milescli.models.base import WeightTable
from milescli.models.facts import Indexer, Layer, ModelFacts, Vision
from milescli.plan.types import TrainerLayout

FILL = 1.15
"""Estimated positions that attention computes for each real one, since sequences of similar length
are padded to a rectangle; at most 1 / 0.7."""
IMBALANCE = 1.5
"""Tokens of the busiest expert rank divided by the mean over ranks, over a whole model: an
estimate."""
INDEXED_QUERIES = 128
"""Queries for which an indexer scores all positions at a time."""
_CHUNK = 64
"""Positions of a chunk of linear attention and of Mamba-2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Describes how full the packed rows are."""

    fill: float = FILL
    """1.0: all sequences of a row are equally long, so that no tensor is rearranged."""
    imbalance: float = IMBALANCE
    longest: int = 0
    """Tokens of the longest sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Holds the memory of one layer in bytes per position of this rank's part of the row (row /
    cp)."""

    saved: float
    """All tensors that its backward pass needs, its input included."""
    input: float
    """The input alone, the only tensor that full recompute saves."""
    widest: float
    """The largest tensors that exist besides these at any moment of its forward or backward
    pass."""


def layer_bytes(
    facts: ModelFacts,
    layer: Layer,
    layout: TrainerLayout,
    *,
    size: int,
    packing: Packing,
    fused_swiglu: bool = False,
) -> LayerBytes:
    """Compute the activation bytes of `layer`. `facts` are the model's facts at this layer
    (`facts.at`), `size` is b. With `fused_swiglu`, a plain SwiGLU saves nothing between its input
    and its output (see `backends.megatron.cpu.swiglu`)."""
    plain = facts.gated_mlp and facts.activation == "silu" and facts.activation_limit is None
    fused = fused_swiglu and plain
    share = 1 / layout.tp if layout.sequence_parallel else 1.0
    residual = facts.hidden_size * share * size
    streams = facts.hyper.num_streams if facts.hyper else 1
    parts = (layer.mixer != "none") + (layer.mlp != "none")
    norms = 2 * parts + (2 if facts.sandwich_norms else 0)
    saved = norms * (residual + 2 * share)
    mixer, widest = _mixer_bytes(facts, layer, layout, share=share, size=size, packing=packing)
    saved += mixer
    if layer.mlp == "dense":
        inner, _ = _mlp(facts, facts.ffn_hidden_size, size=size, fused=fused)
        saved += inner / layout.tp
        widest = max(widest, 2 * facts.ffn_hidden_size * size / layout.tp)
    elif layer.mlp == "moe":
        experts, wide = _expert_bytes(
            facts, layout, share=share, size=size, packing=packing, fused=fused
        )
        saved += experts
        widest = max(widest, wide)
    if facts.hyper:
        saved += parts * _hyper_bytes(facts, share=share, size=size)
        widest = max(widest, 8 * streams * facts.hidden_size * share)
    return LayerBytes(
        saved=saved, input=streams * residual, widest=2 * widest + 2 * facts.hidden_size * size
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterBytes:
    """Holds the memory that the adapter's matrices take in one layer during a pass, in bytes."""

    saved: float = 0.0
    """A x, for each position of this rank's part of the row."""
    fused: float = 0.0
    """Independent of the row: the As and Bs of matrices that Megatron fuses, concatenated."""


def adapter_bytes(
    base: WeightTable,
    adapter: WeightTable,
    layout: TrainerLayout,
    *,
    size: int,
    packing: Packing,
) -> list[AdapterBytes]:
    """Return [layers] the adapter's memory. `adapter`: the adapter's table, next to that of the
    `base`; `size`: b (see `backends.megatron.architecture.lora`)."""
    facts = base.facts
    share = 1 / layout.tp if layout.sequence_parallel else 1.0
    most = min(packing.imbalance, worst_imbalance(facts, layout))
    ranks = {
        base_name(entry): min(entry.shapes[0][-2:])
        for entry, _ in adapter.counted
        if not is_shared(entry)
    }
    saved, fused = [0.0] * facts.num_layers, [0.0] * facts.num_layers
    for entry, times in base.counted:
        adapted = [rank for name in entry.hf if (rank := ranks.get(name))]
        if not adapted:
            continue
        assert entry.layer is not None, "only matrices of layers have adapters"
        rank, is_expert, cut = sum(adapted), entry.rule.is_per_expert, entry.rule.sharding
        rows = (
            share * facts.topk * layout.etp * most if is_expert else 1.0 if cut.dim == 0 else share
        )
        saved[entry.layer] += rows * rank * size
        if len(entry.hf) > 1:
            parts = (layout.etp if is_expert else layout.tp) if cut.axis != "none" else 1
            lengths = sum(shape[0] for shape in entry.shapes) / parts
            columns = entry.shapes[0][1] * (len(adapted) > 1)
            fused[entry.layer] += times / layout.ep**is_expert * rank * (lengths + columns) * size
    return [AdapterBytes(saved=a, fused=b) for a, b in zip(saved, fused, strict=True)]


def shared_attention_bytes(facts: ModelFacts, *, size: int) -> int:
    """Return the bytes that attention saves for a position that several sequences share, where each
    sequence is laid out whole: its query, key and value, the output, and its log-sum-exp."""
    return 2 * (facts.num_heads + facts.num_kv_heads) * facts.head_dim * size + 4 * facts.num_heads


def _hyper_bytes(facts: ModelFacts, *, share: float, size: int) -> float:
    """Return the bytes of a part's hyper-connection: the streams, in float32 too, the part's
    output, and the mixing matrices of all rounds."""
    assert facts.hyper is not None
    n, rounds = facts.hyper.num_streams, facts.hyper.sinkhorn_rounds
    streams = _streams_bytes(facts, size=size) + facts.hidden_size * size
    balanced = 4 * (2 * rounds - 1) * (n * n + n)
    weights = 4 * (2 * (2 + n) * n + 4 * n + 3) + (n * n + n) * size
    return share * (streams + balanced + weights)


def _streams_bytes(facts: ModelFacts, *, size: int) -> float:
    """Return the bytes that a mixer saves of the streams."""
    assert facts.hyper is not None
    return facts.hyper.num_streams * facts.hidden_size * (size + 4 * (size != 4))


def _mixer_bytes(
    facts: ModelFacts,
    layer: Layer,
    layout: TrainerLayout,
    *,
    share: float,
    size: int,
    packing: Packing,
) -> tuple[float, float]:
    """Return the bytes per position of a layer's mixer (attention or its replacement), as (saved,
    widest)."""
    if layer.mixer in ("full", "sliding"):
        blockwise = (
            layer.mixer == "sliding" or facts.attention_sinks or bool(facts.attention_softcap)
        )
        return _attention_bytes(facts, layout, size=size, packing=packing, blockwise=blockwise)
    if layer.mixer == "mla":
        saved, widest = _latent_bytes(facts, layout, share=share, size=size, packing=packing)
        if facts.indexer and facts.indexer.trained and not layer.shares_choice:
            saved += _indexer_bytes(facts.indexer, size=size, packing=packing)
            saved += share * (facts.indexer.head_dim + 2) * size
        return saved, widest
    if layer.mixer == "gated_delta":
        return _delta_bytes(facts, layout, size=size, packing=packing)
    if layer.mixer == "mamba":
        return _mamba_bytes(facts, layout, size=size)
    if layer.mixer == "compressed":
        return _compressed_bytes(facts, layer, layout, share=share, size=size, packing=packing)
    return 0.0, 0.0


def _attention_bytes(
    facts: ModelFacts, layout: TrainerLayout, *, size: int, packing: Packing, blockwise: bool
) -> tuple[float, float]:
    """Return (saved, widest) of: q, k and v as projected (saved if norms of q and k, or unmoved
    values, need them), rotated q and k, the output, its log-sum-exp. Keys and values are gathered
    over context-parallel ranks. If sequences differ in length, q, k, v and the output exist twice:
    in the order of the row and of the rectangles."""
    heads, groups, dim = facts.num_heads / layout.tp, facts.num_kv_heads / layout.tp, facts.head_dim
    query, kv = heads * dim, groups * dim
    gate = query if facts.attention_output_gate else 0.0
    moved = packing.fill != 1.0 or layout.cp > 1
    saved = packing.fill * (2 * query + kv * layout.cp)  # rotated q, output, rotated k
    if moved:
        saved += packing.fill * kv * layout.cp + query  # values, and the output in order of the row
    elif blockwise:
        saved += query  # the output, heads of a position together
    if facts.qk_norm or not moved or gate:
        saved += query + 2 * kv + gate
    if facts.qk_norm and groups > 1:
        saved += query  # heads of one group after the other
    if facts.attention_output_gate:
        saved += 2 * query  # the gate's sigmoid, and what it was multiplied with
    if facts.value_norm:
        saved += 2 * kv
    small = 4 * (
        packing.fill * heads + ((heads + groups) if facts.qk_norm else 0) + (query if gate else 0)
    )
    return saved * size + small, (query + 2 * kv) * size


def _latent_bytes(
    facts: ModelFacts, layout: TrainerLayout, *, share: float, size: int, packing: Packing
) -> tuple[float, float]:
    """Return (saved, widest) of: latents of queries and keys before and after their norms; q, k,
    and v and the output padded to their width; the narrow output."""
    assert facts.mla is not None
    mla, heads = facts.mla, facts.num_heads / layout.tp
    wide = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    latents = 2 * mla.q_lora_rank + 2 * mla.kv_lora_rank + mla.qk_rope_head_dim
    saved = (
        packing.fill * (2 * wide + 2 * wide * layout.cp) + heads * mla.v_head_dim + latents * share
    )
    chosen = chosen_at_once = 0
    if facts.indexer and packing.longest > facts.indexer.topk:
        chosen = packing.longest  # which positions each query looks at
        chosen_at_once = 4 * INDEXED_QUERIES * facts.indexer.num_heads
    return (
        saved * size + packing.fill * chosen + 4 * (heads * packing.fill + 2),
        max(3 * wide * size, chosen_at_once + 2 * chosen),
    )


def _indexer_bytes(indexer: Indexer, *, size: int, packing: Packing) -> float:
    """Return the bytes of queries, key, and head weights of a trained indexer."""
    heads, dim = indexer.num_heads, indexer.head_dim
    return packing.fill * ((heads + 1) * dim * size + 4 * heads)


def _compressed_bytes(
    facts: ModelFacts,
    layer: Layer,
    layout: TrainerLayout,
    *,
    share: float,
    size: int,
    packing: Packing,
) -> tuple[float, float]:
    """Return (saved, widest) of: latents of queries before and after their norm; queries as
    projected (in float32 too, for their norm), rotated and as the output, before and after it is
    rotated back; the key before and after its norm, and with its entries; the output's groups; the
    inputs of the entries."""
    sizes, copies = facts.compressed, size != 4
    assert sizes is not None
    heads, dim = facts.num_heads / layout.tp, facts.head_dim
    query, narrow = heads * dim, 2 * sizes.q_lora_rank + dim
    saved = (query + narrow * share) * size + (4 * query if copies else 0)
    saved += packing.fill * (2 * query + dim) * size + query * size
    saved += sizes.output_groups * sizes.output_rank / layout.tp * size
    saved += 4 * (heads * (1 + packing.fill) + 2) + heads * size * copies
    if layer.compression == "sparse":
        per_channel = 2 * (size + 4 + size * copies) + 2 / sizes.sparse_rate * size
        made = dim * per_channel
        if facts.indexer and facts.indexer.trained:
            # the key is made of as many entries, and lies in one tensor with all that was projected
            saved += _indexer_bytes(facts.indexer, size=size, packing=packing)
            own = facts.indexer.head_dim * (3 * size + per_channel)
            saved += packing.fill * (own + facts.indexer.num_heads * size)
        entries = packing.longest / sizes.sparse_rate
        # which entries each query sees
        chosen = entries if facts.indexer and entries > facts.indexer.topk else 0
        saved += packing.fill * (made + chosen)
    elif layer.compression == "heavy":
        made = 2 * dim * size + dim * (4 + size * copies) + 2 * dim / sizes.heavy_rate * size
        saved += packing.fill * made
    return saved, 2 * 4 * query


def _delta_bytes(
    facts: ModelFacts, layout: TrainerLayout, *, size: int, packing: Packing
) -> tuple[float, float]:
    """Return (saved, widest) of the chunked delta rule in plain PyTorch (`layers.delta_rule`): per
    head, matrices of a chunk's positions by themselves, and a state for every chunk, in float32.
    Context parallelism divides heads instead of positions, which has the same size."""
    assert facts.gated_delta is not None
    delta = facts.gated_delta
    values, keys = delta.num_value_heads / layout.tp, delta.num_key_heads / layout.tp
    dk, dv = delta.key_head_dim, delta.value_head_dim
    channels = 2 * keys * dk + values * dv
    wide = (
        4 * values * _CHUNK
        + 2 * keys * _CHUNK
        + 4.5 * values * dv
        + values * (dk + dv)
        + 2 * values * dk
    )
    wide += 6 * keys * dk + values * dk * dv / _CHUNK + channels + 12 * values
    narrow = 2 * channels + (channels + values * dv + 2 * values) + values * dv
    return packing.fill * 4 * wide + narrow * size, 4 * 3 * values * _CHUNK * packing.fill


def _mamba_bytes(facts: ModelFacts, layout: TrainerLayout, *, size: int) -> tuple[float, float]:
    """Return (saved, widest) of state-space duality in plain PyTorch (`layers.ssd`)."""
    assert facts.mamba is not None
    mamba = facts.mamba
    heads, groups = mamba.num_heads / layout.tp, mamba.num_groups / layout.tp
    inner, states = heads * mamba.head_dim, groups * mamba.state_size
    channels = inner + 2 * states
    wide = 2 * heads * _CHUNK + groups * _CHUNK + (mamba.conv_kernel + 1) * channels + 8 * inner
    wide += (
        2 * heads * mamba.state_size
        + 2 * states
        + 2.5 * inner * mamba.state_size / _CHUNK
        + 8 * heads
    )
    narrow = channels + inner + heads + inner
    return 4 * wide + narrow * size + _CHUNK, 4 * 2 * heads * _CHUNK


def _mlp(
    facts: ModelFacts, width: int, *, size: int, fused: bool, weighted: bool = False
) -> tuple[float, float]:
    """Return (saved, widest) of an MLP with `width` channels. Gated: both halves as projected, the
    activated one, the other plus its offset, the product; else the activated ones and their
    product. Fused: both halves and the product. `weighted`: for an expert, whose output is scaled
    before the last projection."""
    if fused:
        tensors = 3
    elif facts.gated_mlp:
        tensors = 5 + (facts.activation_limit is not None)
    else:
        tensors = 2
    return (tensors + weighted) * width * size, 2 * width * size


def _expert_bytes(
    facts: ModelFacts,
    layout: TrainerLayout,
    *,
    share: float,
    size: int,
    packing: Packing,
    fused: bool,
) -> tuple[float, float]:
    """Return (saved, widest) of the router's scores, and of each token's copies at the experts
    their input and MLP. Dropless: the router decides how many tokens arrive, but a rank with all
    experts gets all."""
    most = min(packing.imbalance, worst_imbalance(facts, layout))
    rows = share * facts.topk * layout.etp * most
    inner, wide = _mlp(facts, facts.moe_ffn_hidden_size, size=size, fused=fused, weighted=True)
    width = facts.moe_latent_size or facts.hidden_size
    saved = rows * (width * size + inner / layout.etp + 4)
    saved += share * (13 * facts.num_experts + 28 * facts.topk)
    if facts.moe_latent_size:
        saved += share * width * size
    if facts.shared_expert_ffn_hidden_size:
        shared, _ = _mlp(facts, facts.shared_expert_ffn_hidden_size, size=size, fused=fused)
        saved += shared / layout.tp
    if facts.shared_expert_gate:
        saved += share * (facts.hidden_size * size + 2 * size)
    if facts.experts_beside_mlp:
        saved += share * facts.hidden_size * (4 * size + 4)
    return saved, rows * (width * size + wide / layout.etp)


def worst_imbalance(facts: ModelFacts, layout: TrainerLayout) -> float:
    """Return how many times its balanced share of tokens one rank gets if all tokens of an
    expert-parallel group choose the experts of that rank."""
    if not facts.num_experts:
        return 1.0
    return layout.ep * min(facts.topk, facts.num_experts // layout.ep) / facts.topk


def head_block(*, on_host: bool) -> tuple[int, int]:
    """Return (tokens, columns) of the logits that exist at once (`train.vocab_parallel`): what fits
    into the cache of a CPU, elsewhere enough work for a kernel (an estimate)."""
    return (2048, 1024) if on_host else (8192, 8192)


def head_bytes(
    facts: ModelFacts,
    layout: TrainerLayout,
    *,
    tokens: int,
    size: int,
    on_host: bool,
    trained: bool = True,
) -> tuple[int, int]:
    """Return the head's memory on the last stage, whose row has `tokens` positions on this rank, as
    (bytes saved for its backward pass, bytes that exist for a moment in it). Saved are the final
    norm's input and the hidden states of the whole row; and for a head that is not `trained` a mean
    row of its weight for each position (`train.vocab_parallel`); the rest is three float32 blocks
    of logits, and the gradients of hidden states and weight."""
    share = 1 / layout.tp if layout.sequence_parallel else 1.0
    streams = _streams_bytes(facts, size=size) * share if facts.hyper else 0
    columns = -(-facts.vocab_size // layout.tp)
    block = head_block(on_host=on_host)
    logits = 3 * 4 * min(block[0], tokens) * min(block[1], columns)
    gradients = facts.hidden_size * (4 * tokens + columns * size)
    saved = facts.hidden_size * (1 + share) * size + streams
    if not trained and facts.logit_softcap is None:
        saved += 4 * facts.hidden_size
    return int(tokens * saved), logits + gradients


def mtp_bytes(
    facts: ModelFacts, layout: TrainerLayout, *, layer: LayerBytes, size: int
) -> tuple[float, float]:
    """Return the memory of a trained MTP layer as (bytes that it saves per position; bytes that
    exist at once on the last stage while it is recomputed, besides the inputs of the decoder
    layers). `layer`: memory of its decoder layer. Added to it are the embedding, the concatenation
    of embedding and hidden state, input and output of the last norm, and what the head saves:
    residual streams, the positions with a token after the next, and the mean row of a weight that
    is not trained. During its recomputation the model's own last norm holds its output, and the
    head nothing."""
    share = 1 / layout.tp if layout.sequence_parallel else 1.0
    hidden = facts.hidden_size * size
    norm = hidden * (1 + share)
    head = hidden + 4 * facts.hidden_size
    streams = _streams_bytes(facts, size=size) * share if facts.hyper else 0
    within = 3 * layer.input + layer.saved + streams
    if layout.recompute == "full":
        return layer.input + norm + head, norm + hidden + within
    return within + norm + head, 0.0


def tower_bytes(
    vision: Vision, *, tokens: int, images: int, step_images: int, size: int, recompute: str
) -> tuple[int, int]:
    """Return (bytes of each microbatch in flight, bytes besides them) of a vision tower on the
    first stage. `tokens`: of a row, of which `images` stand for images; `step_images`: of all
    images that a rank sees in a step, as a frozen tower caches its output for them. An estimate."""
    patches, h = vision.merge_size**2, vision.hidden_size
    outputs = 1 + len(vision.deepstack)
    block = patches * (size * (10 * h + 3 * vision.ffn_hidden_size) + 8 * h)
    features = outputs * vision.out_hidden_size * size
    in_flight, image_bytes = tokens * features, images * block
    if vision.trained == "frozen":
        return in_flight, image_bytes + step_images * features
    in_flight += images * outputs * 3 * patches * h * size
    if vision.trained == "all":
        saved_bytes = patches * h * size if recompute == "full" else block
        in_flight += images * vision.depth * saved_bytes
    return in_flight, image_bytes
