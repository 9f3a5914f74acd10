"""Defines the facts of a model, as plain numbers from config.json. Families fill them in, and every
package may read them. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Literal

Mixer = Literal["full", "sliding", "mla", "gated_delta", "mamba", "compressed", "none"]
"""How a layer mixes tokens: attention over all positions, attention over a window, multi-head
latent attention, gated delta net (linear attention), Mamba-2, attention over a window and
compressed positions (DeepSeek-V4), or not at all."""
Mlp = Literal["dense", "moe", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Describes one layer. A field that is None takes the value of ModelFacts."""

    mixer: Mixer = "full"
    mlp: Mlp = "dense"
    num_kv_heads: int | None = None
    head_dim: int | None = None
    key_is_value: bool = False
    """True if the keys' projection also gives the values (Gemma 4)."""
    unrotated: bool = False
    """True if attention has no rotary embedding in this layer, though other layers have one
    (SmolLM3)."""
    shares_choice: bool = False
    """True if sparse attention reuses the positions that the layer before chose, and has no indexer
    (arXiv 2603.12201)."""
    compression: Literal["none", "sparse", "heavy"] = "none"
    """Kind of compressed attention, by what the layer sees beyond its window: none: nothing;
    sparse: entries that an indexer chooses; heavy: all entries, each of more positions."""
    hash_routing: bool = False
    """True if a table maps the token's id to its experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Describes how a rotary embedding is stretched beyond its training length."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_positions: int
    low_freq_factor: float = 1.0
    """Used by llama3."""
    high_freq_factor: float = 4.0
    """Used by llama3."""
    beta_fast: float = 32.0
    """Used by yarn."""
    beta_slow: float = 1.0
    """Used by yarn."""
    mscale: float | None = None
    """Used by yarn, as DeepSeek writes it."""
    mscale_all_dim: float | None = None
    """Used by yarn, as DeepSeek writes it; scales the softmax."""
    attention_factor: float | None = None
    """Used by yarn: factor of cos and sin; None: from the formula of the paper."""
    truncate: bool = True
    """Used by yarn: True if the ends of the ramp are rounded to whole dims (gpt-oss: False)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Describes a rotary position embedding."""

    theta: float
    share: float = 1.0
    """Share of each head's dims that is rotated, counted from the first (`partial_rotary_factor`).
    """
    interleaved: bool = False
    """True if dims are rotated in neighbouring pairs (0, 1), (2, 3) as in GPT-J; otherwise in
    halves as in GPT-NeoX."""
    proportional: bool = False
    """True if, of the angles of the whole head, the first `share` rotate and the rest stay fixed
    (Gemma 4); otherwise the head's first dims have their own angles."""
    scaling: RopeScaling | None = None
    sections: tuple[int, int, int] | None = None
    """M-RoPE (Qwen2-VL, arXiv 2409.12191, section 2.1): how many angles use a token's time, its row
    and its column, which differ only in images; None: all angles use its one position."""
    sections_interleaved: bool = False
    """True if the three sections alternate from the first angle on (Qwen3-VL); otherwise one
    follows the other."""


_PROJECTORS = ("vision.merger.", "vision.deepstack_merger_list.", "vision.multi_modal_projector.")
"""Prefixes of Megatron names of the projectors, which turn a tower's features into tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """Describes the tower and projector that make tokens of images. The trainer computes them with
    transformers' module, before the decoder."""

    tower: Literal["qwen2_5_vl", "qwen3_vl", "siglip"]
    """Name of transformers' module; siglip is followed by Gemma 3's projector."""
    config: str
    """JSON of the `vision_config` from which the module is made."""
    depth: int
    hidden_size: int
    ffn_hidden_size: int
    out_hidden_size: int
    """Equals the decoder's hidden_size."""
    patch_shape: tuple[int, int, int, int]
    """[4] channels, frames, rows and columns of a patch of pixels."""
    merge_size: int
    """This many rows and this many columns of patches become one token."""
    num_positions: int = 0
    """Number of learned position embeddings; 0: none."""
    deepstack: tuple[int, ...] = ()
    """Layers of the tower, from 0, whose projected outputs are added to the outputs of the
    decoder's first layers, one each (arXiv 2406.04334)."""
    image_token_id: int
    mutual: bool = False
    """True if all tokens of an image attend to each other, also to later ones (Gemma 3)."""
    trained: Literal["frozen", "projector", "all"] = "frozen"
    """Which weights of the tower and projector are trained (`model.vision`)."""

    def trains(self, name: str) -> bool:
        """Return True if the weight with this Megatron name, one of the tower or projector, is
        trained."""
        is_projector = name.startswith(_PROJECTORS)
        return self.trained == "all" or (self.trained == "projector" and is_projector)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Describes multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    q_lora_rank: int
    """0: queries are projected directly."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6
    """Epsilon of the latents' norms. Hugging Face's implementation uses this value and ignores
    `rms_norm_eps`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Describes the selection of positions in sparse attention (DeepSeek-V3.2's report)."""

    num_heads: int
    head_dim: int
    topk: int
    rope_interleaved: bool = False
    """True if its first dims are rotated in neighbouring pairs, as with `Rope.interleaved`;
    otherwise in halves."""
    norm_eps: float = 1e-6
    trained: bool = False
    """True if its weights are trained (`model.indexer`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """Describes a gated delta net (arXiv 2412.06464)."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    float32: bool = False
    """True if the decay and the norm after it are float32, whatever dtype the other weights have
    (`mamba_ssm_dtype`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """Describes a Mamba-2 mixer (arXiv 2405.21060)."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_kernel: int
    conv_bias: bool = True

    @property
    def inner_size(self) -> int:
        """Return the number of channels of all heads together."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """Describes compressed attention in DeepSeek-V4 (its report, section 2.3)."""

    q_lora_rank: int
    sparse_rate: int
    """Positions per entry in layers with `sparse` compression."""
    heavy_rate: int
    """Positions per entry in layers with `heavy` compression."""
    output_groups: int
    """Number of groups of heads, each with its own projection."""
    output_rank: int
    """Width to which each group is projected."""
    rope_head_dim: int
    """Number of dims that are rotated, at the end of each head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnections:
    """Describes parallel residual streams, which are mixed before and after each part of a layer
    (DeepSeek-V4's report, section 2.2)."""

    num_streams: int
    sinkhorn_rounds: int = 20
    """Number of rounds that scale the rows and columns of a mixing matrix to sum to 1."""
    eps: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Holds everything about a model that a package needs without loading it."""

    family: str
    """`model_type` of the (text) config: qwen3, qwen3_moe, ..."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    """Width of the dense layers' MLP; 0 if there are none."""
    vocab_size: int
    tied_embeddings: bool
    """True if the output layer uses the embedding's weight."""
    rope: Rope | None
    """None: positions are not embedded (Nemotron-H)."""
    norm_eps: float
    max_position_embeddings: int
    qk_norm: bool
    """True if queries and keys are normalised per head before the rotary embedding."""
    qkv_bias: bool
    """True if query, key and value projections have a bias."""
    layers: tuple[Layer, ...]
    """[num_layers]"""
    # attention
    qk_norm_over_heads: bool = False
    """True if queries and keys are normalised over all heads of a position together (MiniMax-M2).
    """
    attention_output_bias: bool = False
    attention_output_gate: bool = False
    """True if the attention's output is multiplied by the sigmoid of a gate, which is projected
    together with the queries."""
    attention_sinks: bool = False
    """True if a learned logit per head takes part in the softmax."""
    attention_scale: float | None = None
    """Scale of the attention logits; None: head_dim ** -0.5."""
    attention_softcap: float | None = None
    sliding_window: int = 0
    """Number of positions that a `sliding` layer attends to, its own included."""
    rope_sliding: Rope | None = None
    """Rotary embedding of `sliding` layers; None: `rope`."""
    value_norm: bool = False
    """True if values are normalised per head, without a weight (Gemma 4)."""
    mla: Mla | None = None
    indexer: Indexer | None = None
    gated_delta: GatedDelta | None = None
    mamba: Mamba | None = None
    compressed: Compressed | None = None
    hyper: HyperConnections | None = None
    # MLP
    activation: Literal["silu", "gelu_tanh", "relu2", "clamped_swiglu"] = "silu"
    """clamped_swiglu: gpt-oss's (up + 1) * gate * sigmoid(1.702 gate) with both clamped."""
    activation_limit: float | None = None
    """Limit before the activation: the gate is clamped to at most this, and its factor to +- this.
    """
    gated_mlp: bool = True
    mlp_bias: bool = False
    # experts
    num_experts: int = 0
    """Number of experts per layer; 0 for a dense model."""
    topk: int = 0
    """Number of experts per token."""
    moe_ffn_hidden_size: int = 0
    """Width of one expert."""
    normalize_topk: bool = False
    """True if the chosen experts' probabilities are scaled to sum to 1."""
    shared_expert_ffn_hidden_size: int = 0
    """Width of all shared experts together; 0 if there are none."""
    shared_expert_gate: bool = False
    """True if the shared expert's output is multiplied by the sigmoid of a gate."""
    router_score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    router_bias: bool = False
    """True if a correction is added to the scores when experts are chosen, but not to their weights
    (`e_score_correction_bias`)."""
    router_groups: int = 1
    """Number of groups of experts; experts are chosen from the best `router_topk_groups` of them.
    """
    router_topk_groups: int = 1
    router_scaling: float = 1.0
    """Factor of the chosen experts' weights."""
    moe_latent_size: int = 0
    """Width of the experts' inputs and outputs, between two projections; 0: hidden_size, without
    projections."""
    experts_beside_mlp: bool = False
    """True if the shared expert is a plain MLP parallel to the routed experts, each with its own
    norms before and after. The router then sees the normalised input of the layer, and scales it
    and the experts' weights with learned numbers (Gemma 4)."""
    # the rest of a layer, and of the model
    layer_scalar: bool = False
    """True if the output of a layer is multiplied by a number that is not a parameter (Gemma 4)."""
    norm_zero_centered: bool = False
    """True if norms multiply by 1 + weight (stored like this, so that nothing is rounded)."""
    sandwich_norms: bool = False
    """True if the outputs of attention and MLP are also normalised, before they are added."""
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    scores: bool = False
    """True if the model gives a score instead of a next token (reward models, critics): its output
    layer is one row."""
    num_mtp_layers: int = 0
    """Number of multi-token-prediction layers in the release."""
    trains_mtp: bool = False
    """True if MTP layers are trained and counted with the model; otherwise they are only converted
    and exported."""
    mtp_layers: tuple[Layer, ...] = ()
    """The layers within each multi-token-prediction layer, in order, if it has several
    (Nemotron-H)."""
    multimodal: bool = False
    """True if the release has towers besides the text model; they are passed through."""
    vision: Vision | None = None
    """The tower that is computed; None: the model gets no images in miles."""
    dtype: str = "float32"
    """Dtype of the weights on disk, according to the config: float32, bfloat16 or float16."""
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_query_heads_per_group(self) -> int:
        """Return the number of query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def common_kv_heads(self) -> int:
        """Return the greatest common divisor of all layers' key-value heads: the most parts into
        which every layer's heads can be cut."""
        return gcd(*(layer.num_kv_heads or self.num_kv_heads for layer in self.layers))

    def at(self, layer: int | None) -> ModelFacts:
        """Return the facts as they apply to layer `layer` (from 0): a layer's own heads replace the
        model's."""
        if layer is None or layer >= self.num_layers:
            return self
        own = self.layers[layer]
        if own.num_kv_heads is None and own.head_dim is None:
            return self
        return _for_layer(self, own)

    def is_moe_layer(self, layer: int) -> bool:
        """Return True if layer `layer` (from 0) has experts."""
        return self.layers[layer].mlp == "moe"

    @property
    def mtp_layer(self) -> Layer:
        """Return the decoder layer inside a trained multi-token-prediction layer: with experts if
        the model has some, with full attention if its layers keep a state, and without compressed
        positions."""
        last = replace(self.layers[-1], compression="none", hash_routing=False)
        mixer = "full" if self.gated_delta is not None else last.mixer
        return replace(last, mixer=mixer, mlp="moe" if self.num_experts else "dense")

    @property
    def num_indexers(self) -> int:
        """Return the number of layers with their own indexer."""
        own = sum(
            layer.compression == "sparse" if self.compressed else not layer.shares_choice
            for layer in self.layers
        )
        return own if self.indexer is not None else 0

    @property
    def num_moe_layers(self) -> int:
        """Return the number of layers with experts."""
        return sum(layer.mlp == "moe" for layer in self.layers)


@lru_cache(maxsize=256)
def _for_layer(facts: ModelFacts, layer: Layer) -> ModelFacts:
    changes = {
        name: value
        for name in ("num_kv_heads", "head_dim")
        if (value := getattr(layer, name)) is not None
    }
    return replace(facts, **changes)


def plain_layers(num_layers: int, *, moe: tuple[bool, ...] = ()) -> tuple[Layer, ...]:
    """Return layers of full attention; `moe` [num_layers] is True for the layers with experts."""
    return tuple(Layer(mlp="moe" if moe and moe[index] else "dense") for index in range(num_layers))
