"""Shares code among the families with multi-head latent attention (DeepSeek, Kimi, GLM): facts from
their configs, and the rules of their attention, of the indexer of sparse attention and of their
multi-token-prediction layers. Not itself a family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from milescli.core.errors import CheckpointError
from milescli.models import fields, layers
from milescli.models.base import COLUMN, ROW, Rule, WeightTable, mixer_layers
from milescli.models.facts import Indexer, Layer, Mla, ModelFacts, Rope
from milescli.models.tensor_rules import Size, hidden, queries, tensor_rule

_HF = "model.layers.{layer}.self_attn."
_MEGATRON = "decoder.layers.{layer}.self_attention."
_INDEXER = _MEGATRON + "core_attention.indexer."
_NO_BIAS = "no release has biases there, so nothing could be compared with"
_SUPPORTED: tuple[tuple[str, object, str], ...] = (
    ("hidden_act", "silu", "the trainer computes gated SiLU only"),
    ("attention_bias", False, _NO_BIAS),
    ("mlp_bias", False, _NO_BIAS),
    ("scoring_func", "sigmoid", "Hugging Face's implementation scores experts by sigmoid alone"),
    (
        "topk_method",
        "noaux_tc",
        "Hugging Face's implementation chooses experts in this way alone",
    ),
    (
        "moe_layer_freq",
        1,
        "Hugging Face's implementation has experts in every layer after the first",
    ),
)
"""(key of config.json, the only value that is computed, why)"""
LATENT_LAYERS = mixer_layers("mla")
OLD_BUFFERS = r"\.self_attn\.rotary_emb\.inv_freq$"
"""Pattern of rotary frequencies, which some releases store in every layer although they follow from
config.json."""


def mla(config: Mapping[str, object]) -> Mla:
    """Parse the sizes of the latent attention. `q_lora_rank: null` means that queries are projected
    directly."""
    at_once = "q_lora_rank" in config and config["q_lora_rank"] is None
    return Mla(
        q_lora_rank=0 if at_once else fields.number(config, "q_lora_rank", kind=int),
        kv_lora_rank=fields.number(config, "kv_lora_rank", kind=int),
        qk_nope_head_dim=fields.number(config, "qk_nope_head_dim", kind=int),
        qk_rope_head_dim=fields.number(config, "qk_rope_head_dim", kind=int),
        v_head_dim=fields.number(config, "v_head_dim", kind=int),
    )


def rope(config: Mapping[str, object]) -> Rope:
    """Parse the rotary embedding, which covers a separate part of each head and rotates all of
    it."""
    positions = fields.rope(
        config, interleaved=fields.number(config, "rope_interleave", default=True, kind=bool)
    )
    if positions.share != 1.0:
        raise CheckpointError(
            f"latent attention with `partial_rotary_factor: {positions.share}` is not supported",
            why="its heads have a separate part for positions (`qk_rope_head_dim`), which is "
            "rotated as a whole",
            fix="set `partial_rotary_factor` to 1.0 in config.json",
        )
    return positions


def facts(
    config: Mapping[str, object],
    *,
    family: str,
    dense: tuple[bool, ...],
    indexer: Indexer | None = None,
) -> ModelFacts:
    """Parse the ModelFacts of a model with latent attention and sigmoid routing.

    `dense` [num_layers] is True for the layers without experts. Raises CheckpointError for what the
    trainer cannot compute."""
    for name, usual, why in _SUPPORTED:
        fields.refuse(config, name, unless=usual, why=why)
    sizes = mla(config)
    if indexer is not None:
        _check_indexer(config, indexer, sizes)
    num_heads = fields.number(config, "num_attention_heads", kind=int)
    num_experts = fields.number(
        config, "n_routed_experts", "num_experts", "num_local_experts", kind=int
    )
    topk = fields.number(config, "num_experts_per_tok", kind=int)
    num_groups, topk_groups = (
        fields.number(config, name, default=1, kind=int) for name in ("n_group", "topk_group")
    )
    _check_choice(
        num_experts=num_experts, topk=topk, num_groups=num_groups, topk_groups=topk_groups
    )
    expert_size = fields.number(config, "moe_intermediate_size", kind=int)
    return ModelFacts(
        family=family,
        num_layers=len(dense),
        hidden_size=fields.number(config, "hidden_size", kind=int),
        num_heads=num_heads,
        # every head has keys and values of its own, projected up from the latent
        num_kv_heads=num_heads,
        head_dim=sizes.qk_nope_head_dim + sizes.qk_rope_head_dim,
        ffn_hidden_size=fields.number(config, "intermediate_size", kind=int),
        vocab_size=fields.number(config, "vocab_size", kind=int),
        tied_embeddings=fields.number(config, "tie_word_embeddings", default=False, kind=bool),
        rope=rope(config),
        norm_eps=fields.number(config, "rms_norm_eps", kind=float),
        max_position_embeddings=fields.number(config, "max_position_embeddings", kind=int),
        qk_norm=False,
        qkv_bias=False,
        layers=tuple(Layer(mixer="mla", mlp="dense" if plain else "moe") for plain in dense),
        mla=sizes,
        indexer=indexer,
        num_experts=num_experts,
        topk=topk,
        moe_ffn_hidden_size=expert_size,
        normalize_topk=fields.number(config, "norm_topk_prob", kind=bool),
        shared_expert_ffn_hidden_size=expert_size
        * fields.number(config, "n_shared_experts", kind=int),
        router_score="sigmoid",
        router_bias=True,
        router_groups=num_groups,
        router_topk_groups=topk_groups,
        router_scaling=fields.number(config, "routed_scaling_factor", kind=float),
        num_mtp_layers=fields.number(config, "num_nextn_predict_layers", default=0, kind=int),
        dtype=fields.dtype(config),
        eos_token_ids=fields.eos_token_ids(config),
    )


def with_indexer(facts: ModelFacts, trained: Literal["frozen", "kl"]) -> ModelFacts:
    """Return the facts of a model whose indexer is trained according to `model.indexer`. Raises
    CheckpointError if it has none."""
    if facts.indexer is not None:
        return replace(facts, indexer=replace(facts.indexer, trained=trained == "kl"))
    if trained == "frozen":
        return facts
    raise CheckpointError(
        f"a `{facts.family}` model has no indexer that could be trained",
        why=f"`model.indexer` is {trained}, but only deepseek_v32, deepseek_v4 and glm_moe_dsa "
        "have indexers",
        fix=["--set model.indexer=frozen", "--set model.path=deepseek-ai/DeepSeek-V3.2"],
    )


def _check_indexer(config: Mapping[str, object], indexer: Indexer, sizes: Mla) -> None:
    fields.refuse(
        config,
        "rope_interleave",
        unless=True,
        why="Hugging Face's implementation only rotates neighbouring pairs",
    )
    wrong = None
    if not sizes.q_lora_rank:
        wrong = ("q_lora_rank", "the indexer looks at the queries' latent, and there is none")
    elif indexer.head_dim < sizes.qk_rope_head_dim:
        wrong = (
            "index_head_dim",
            f"{sizes.qk_rope_head_dim} dims are rotated, and the indexer's heads have "
            f"{indexer.head_dim}",
        )
    _refuse(wrong)


def _refuse(wrong: tuple[str, str] | None) -> None:
    """Raise CheckpointError for (field, what is wrong with it); do nothing for None."""
    if wrong:
        raise CheckpointError(
            f"config.json cannot be used: `{wrong[0]}`", why=wrong[1], fix="correct config.json"
        )


def _check_choice(*, num_experts: int, topk: int, num_groups: int, topk_groups: int) -> None:
    wrong = None
    if num_groups < 1 or num_experts % num_groups:
        wrong = ("n_group", f"{num_experts} experts cannot form {num_groups} equal groups")
    elif not 1 <= topk_groups <= num_groups:
        wrong = ("topk_group", f"{topk_groups} of {num_groups} groups cannot be chosen")
    elif not 1 <= topk <= num_experts // num_groups * topk_groups:
        wrong = (
            "num_experts_per_tok",
            f"{topk} of {num_experts // num_groups * topk_groups} experts cannot be chosen",
        )
    elif num_experts // num_groups < 2:
        wrong = ("n_group", "a group is judged by its best two experts, and these have one")
    _refuse(wrong)


def dense_first(config: Mapping[str, object]) -> tuple[bool, ...]:
    """Return [num_layers] booleans: True for a layer without experts. They come from
    `mlp_layer_types`, or else are True for the first `first_k_dense_replace`."""
    num_layers = fields.number(config, "num_hidden_layers", kind=int)
    listed = config.get("mlp_layer_types")
    if listed is None:
        first = fields.number(config, "first_k_dense_replace", kind=int)
        return tuple(layer < first for layer in range(num_layers))
    if (
        not isinstance(listed, list)
        or len(listed) != num_layers
        or set(listed) - {"dense", "sparse"}
    ):
        raise fields.unusable_field(
            "mlp_layer_types",
            why=f"it must be a list of {num_layers} times `dense` or `sparse`",
            fix="correct config.json",
        )
    return tuple(kind == "dense" for kind in listed)


def _latent(hf: str, megatron: str, *dims: Size, **others: Any) -> Rule:
    """Return the rule of a tensor of the attention. `others` are as for `tensor_rule`."""
    return tensor_rule(_HF + hf, megatron, *dims, where=LATENT_LAYERS, **others)


def _mla(facts: ModelFacts) -> Mla:
    assert facts.mla is not None
    return facts.mla


def _indexer(facts: ModelFacts) -> Indexer:
    assert facts.indexer is not None
    return facts.indexer


def _query_rank(facts: ModelFacts) -> int:
    return _mla(facts).q_lora_rank


def _index_head(facts: ModelFacts) -> int:
    return _indexer(facts).head_dim


_DIRECT_QUERY = (
    _latent("q_proj.weight", _MEGATRON + "linear_q_proj.weight", queries, hidden, sharding=COLUMN),
)
_LATENT_QUERY = (
    _latent("q_a_layernorm.weight", _MEGATRON + "q_layernorm.weight", _query_rank),
    _latent(
        "q_b_proj.weight",
        _MEGATRON + "linear_q_up_proj.weight",
        queries,
        _query_rank,
        sharding=COLUMN,
    ),
    # the projections down are small: every rank of tensor parallelism holds them whole
    _latent(
        "q_a_proj.weight",
        _MEGATRON + "linear_q_down_proj.weight",
        _query_rank,
        hidden,
        together="down",
    ),
)
_KEY_VALUE = (
    _latent(
        "kv_a_proj_with_mqa.weight",
        _MEGATRON + "linear_kv_down_proj.weight",
        lambda f: _mla(f).kv_lora_rank + _mla(f).qk_rope_head_dim,
        hidden,
        together="down",
    ),
    _latent(
        "kv_a_layernorm.weight", _MEGATRON + "kv_layernorm.weight", lambda f: _mla(f).kv_lora_rank
    ),
    _latent(
        "kv_b_proj.weight",
        _MEGATRON + "linear_kv_up_proj.weight",
        lambda f: f.num_heads * (_mla(f).qk_nope_head_dim + _mla(f).v_head_dim),
        lambda f: _mla(f).kv_lora_rank,
        sharding=COLUMN,
    ),
)
_OUTPUT = _latent(
    "o_proj.weight",
    _MEGATRON + "linear_proj.weight",
    hidden,
    lambda f: f.num_heads * _mla(f).v_head_dim,
    sharding=ROW,
)
_CHOICE = (
    _latent(
        "indexer.wq_b.weight",
        _INDEXER + "linear_wq_b.weight",
        lambda f: _indexer(f).num_heads * _indexer(f).head_dim,
        _query_rank,
    ),
    _latent("indexer.k_norm.weight", _INDEXER + "k_norm.weight", _index_head),
    _latent("indexer.k_norm.bias", _INDEXER + "k_norm.bias", _index_head),
    _latent(
        "indexer.wk.weight",
        _INDEXER + "linear_wk.weight",
        _index_head,
        hidden,
        together="indexer",
    ),
    _latent(
        "indexer.weights_proj.weight",
        _INDEXER + "linear_weights_proj.weight",
        lambda f: _indexer(f).num_heads,
        hidden,
        together="indexer",
    ),
)


def attention(facts: ModelFacts) -> tuple[Rule, ...]:
    """Return the rules of a layer's attention, including its indexer."""
    query = _LATENT_QUERY if _mla(facts).q_lora_rank else _DIRECT_QUERY
    choice = (
        tuple(replace(rule, where=layers_that_choose) for rule in _CHOICE) if facts.indexer else ()
    )
    return (*query, *_KEY_VALUE, _OUTPUT, *choice)


def layers_that_choose(facts: ModelFacts, layer: int) -> bool:
    """Return True for layers with their own indexer; the others reuse the choice of the layer
    before."""
    return not facts.layers[layer].shares_choice


def table(facts: ModelFacts) -> WeightTable:
    """Map the names and transforms of every weight."""
    attends = attention(facts)
    shared = (layers.SHARED_UP, layers.SHARED_DOWN) if facts.shared_expert_ffn_hidden_size else ()
    experts = (layers.ROUTER, layers.ROUTER_BIAS, layers.EXPERT_UP, layers.EXPERT_DOWN, *shared)
    rules = (
        layers.EMBEDDING,
        layers.INPUT_NORM,
        *attends,
        layers.MLP_NORM,
        layers.MLP_UP,
        layers.MLP_DOWN,
        *experts,
        layers.FINAL_NORM,
        *(() if facts.tied_embeddings else (layers.OUTPUT_LAYER,)),
        *layers.MTP_FRAME,
        *layers.in_mtp((layers.INPUT_NORM, *attends, layers.MLP_NORM, *experts)),
    )
    return WeightTable(facts=facts, rules=rules, ignored=(OLD_BUFFERS,))
