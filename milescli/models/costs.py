"""Computes what a model costs from its facts alone: bytes of weights, cache bytes of a sequence,
FLOPs of a token. Pure; the planner uses it."""

from __future__ import annotations

from dataclasses import dataclass

from milescli.models.base import WeightTable
from milescli.models.facts import Layer, ModelFacts

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Bytes by dtype, named as in config.json and torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCost:
    """Holds what an engine caches of one sequence, over all layers and all tensor-parallel ranks
    together, at a given dtype."""

    bytes_per_token: int
    """Bytes of layers that cache every position: keys and values, the latent of MLA, the indexer's
    keys."""
    window_bytes_per_token: int
    """Bytes of layers that cache only the last `window` positions."""
    window: int
    state_bytes: int
    """Bytes of layers whose memory does not grow: the float32 state of gated delta nets and
    Mamba-2, and the last inputs of their convolutions."""

    def bytes_of(self, context: int) -> int:
        """Return the bytes of a sequence of `context` tokens."""
        return (
            context * self.bytes_per_token
            + min(context, self.window) * self.window_bytes_per_token
            + self.state_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFlops:
    """Counts the floating-point operations of one token; a multiply-add counts as two. Softmax,
    norms and activations are not counted, as is customary."""

    matmul: int
    """2 x every weight that the token is multiplied with (Kaplan et al., arXiv 2001.08361, table
    1): only active experts, with the output layer, without the lookup of the embedding."""
    attention_per_position: int
    """FLOPs per position of the layers that attend to all positions: 2 (q k) + 2 (p v) per head
    dim."""
    window_per_position: int
    """FLOPs per position of the layers that attend to the last `window` positions, or to as many
    that an indexer chooses."""
    window: int
    recurrence: int
    """FLOPs of state updates in recurrent form: gated delta net (arXiv 2412.06464, eq. 10:
    decay, k S, rank-one update, q S) and Mamba-2 (arXiv 2405.21060, section 2: decay, rank-one
    update, C h)."""

    def forward(self, context: int) -> int:
        """Return the FLOPs of a token that attends to `context` positions, including its own."""
        seen = (
            context * self.attention_per_position
            + min(context, self.window) * self.window_per_position
        )
        return self.matmul + seen + self.recurrence

    def forward_mean(self, length: int) -> float:
        """Return the mean FLOPs of the tokens of a sequence of `length` (position t attends to t
        tokens)."""
        window = min(self.window, length)
        mean_window = window - window * (window - 1) / (2 * length) if window else 0.0
        seen = (
            length + 1
        ) / 2 * self.attention_per_position + mean_window * self.window_per_position
        return self.matmul + seen + self.recurrence


def weight_bytes(weights: WeightTable, *, dtype: str | None = None) -> int:
    """Return the bytes of all weights in `dtype` (None: that of the config), with MTP layers only
    if they are trained."""
    return weights.num_parameters * DTYPE_BYTES[dtype or weights.facts.dtype]


def cache_cost(facts: ModelFacts, *, dtype: str = "bfloat16") -> CacheCost:
    """Return the cache cost of a model. `dtype` is that of keys and values."""
    size = DTYPE_BYTES[dtype]
    per_token = window_per_token = state = 0
    for number, layer in enumerate(facts.layers):
        cached = _cached_per_token(facts.at(number), layer) * size
        if layer.mixer == "sliding":
            window_per_token += cached
        else:
            per_token += cached
        if layer.mixer == "compressed":
            window_per_token += facts.head_dim * size
        state += _state_bytes(facts, layer, size=size)
    return CacheCost(
        bytes_per_token=per_token,
        window_bytes_per_token=window_per_token,
        window=facts.sliding_window,
        state_bytes=state,
    )


def _cached_per_token(facts: ModelFacts, layer: Layer) -> int:
    """Return how many numbers a layer caches per token."""
    if layer.mixer == "mla":
        assert facts.mla is not None
        latent = facts.mla.kv_lora_rank + facts.mla.qk_rope_head_dim
        return latent + (facts.indexer.head_dim if facts.indexer else 0)
    if layer.mixer == "compressed" and facts.compressed and facts.indexer:
        # beside what the window keeps, whose keys are its values
        cached = {
            "none": 0,
            "sparse": (facts.head_dim + facts.indexer.head_dim) // facts.compressed.sparse_rate,
            "heavy": facts.head_dim // facts.compressed.heavy_rate,
        }
        return cached[layer.compression]
    return 2 * facts.num_kv_heads * facts.head_dim if layer.mixer in ("full", "sliding") else 0


def _state_bytes(facts: ModelFacts, layer: Layer, *, size: int) -> int:
    if layer.mixer == "gated_delta" and facts.gated_delta:
        delta = facts.gated_delta
        keys, values = (
            delta.num_key_heads * delta.key_head_dim,
            delta.num_value_heads * delta.value_head_dim,
        )
        return 4 * delta.num_value_heads * delta.key_head_dim * delta.value_head_dim + size * (
            2 * keys + values
        ) * (delta.conv_kernel - 1)
    if layer.mixer == "mamba" and facts.mamba:
        mamba = facts.mamba
        channels = mamba.num_heads * mamba.head_dim + 2 * mamba.num_groups * mamba.state_size
        return 4 * mamba.num_heads * mamba.head_dim * mamba.state_size + size * channels * (
            mamba.conv_kernel - 1
        )
    return 0


def token_flops(weights: WeightTable) -> TokenFlops:
    """Return the FLOPs of the model per token, including MTP layers if they are trained."""
    facts = weights.facts
    full = window = recurrence = 0
    for number, layer in enumerate(facts.layers):
        if layer.mixer == "compressed":
            window += 4 * facts.num_heads * facts.head_dim
            full += _per_compressed(facts, layer)
            continue
        per_position = _per_position(facts.at(number), layer)
        if layer.mixer == "sliding" or facts.indexer:
            window += per_position
        else:
            full += per_position
        if facts.indexer:
            full += 2 * facts.indexer.num_heads * facts.indexer.head_dim
        recurrence += _recurrence(facts, layer)
    if facts.trains_mtp:
        full += _per_position(facts, facts.mtp_layer)
    return TokenFlops(
        matmul=_matmul(weights),
        attention_per_position=full,
        window_per_position=window,
        window=facts.indexer.topk
        if facts.indexer and facts.compressed is None
        else facts.sliding_window,
        recurrence=recurrence,
    )


def _matmul(weights: WeightTable) -> int:
    facts, total = weights.facts, 0
    for entry, times in weights.counted:
        if not weights.holds(entry) or entry.rule.on_first_stage:
            continue
        size = sum(_elements(shape) for shape in entry.shapes if len(shape) > 1)
        total += 2 * size * (times if entry.expert is None else facts.topk)
    # MTP layers have the output layer in common with the model
    heads = facts.num_mtp_layers * facts.trains_mtp + facts.tied_embeddings
    return total + 2 * facts.vocab_size * facts.hidden_size * heads


def _elements(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _per_position(facts: ModelFacts, layer: Layer) -> int:
    if layer.mixer == "mla":
        assert facts.mla is not None
        mla = facts.mla
        return 2 * facts.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
    return 4 * facts.num_heads * facts.head_dim if layer.mixer in ("full", "sliding") else 0


def _per_compressed(facts: ModelFacts, layer: Layer) -> int:
    """Return the FLOPs per position of a layer with compressed attention; each position counts as
    its share of an entry. All entries are counted although the indexer takes at most `topk`, so the
    result is too high for long contexts."""
    assert facts.compressed is not None and facts.indexer is not None
    look = 4 * facts.num_heads * facts.head_dim
    if layer.compression == "sparse":
        return (
            look + 2 * facts.indexer.num_heads * facts.indexer.head_dim
        ) // facts.compressed.sparse_rate
    return look // facts.compressed.heavy_rate if layer.compression == "heavy" else 0


def _recurrence(facts: ModelFacts, layer: Layer) -> int:
    if layer.mixer == "gated_delta" and facts.gated_delta:
        delta = facts.gated_delta
        return 7 * delta.num_value_heads * delta.key_head_dim * delta.value_head_dim
    if layer.mixer == "mamba" and facts.mamba:
        return 5 * facts.mamba.num_heads * facts.mamba.head_dim * facts.mamba.state_size
    return 0


MAX_GROUPED_SIZE = 2**18
"""Size of an expert's first matrix up to which a CPU computes experts faster in one product:
forward and backward pass took 0.4 to 0.95 of a loop's time, but 1.15 at 786,432."""


def groups_experts(*, numbers: int, dtype: object, on_cpu: bool) -> bool:
    """Return True if one product over all experts of a rank is faster than a loop over them.
    `numbers` counts one expert's first matrix on the rank, `dtype` is a name or torch's."""
    name = str(dtype).removeprefix("torch.")
    return numbers <= MAX_GROUPED_SIZE and name == "float32" if on_cpu else name == "bfloat16"
