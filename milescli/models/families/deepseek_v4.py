"""Family DeepSeek-V4 (Flash and Pro): attention over a window and compressed positions,
hyper-connections, and experts in every layer, which the token's id chooses in the first layers.
Facts from its config. Megatron-Core 0.16.1 has no such model: the names are in its style."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from milescli.models import fields
from milescli.models.facts import (
    Compressed,
    HyperConnections,
    Indexer,
    Layer,
    ModelFacts,
    Rope,
)
from milescli.models.families.deepseek_v4_table import table

__all__ = ["facts", "table"]

_COMPRESSIONS = {
    "sliding_attention": "none",
    "compressed_sparse_attention": "sparse",
    "heavily_compressed_attention": "heavy",
}
_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def facts(config: Mapping[str, object]) -> ModelFacts:
    """Parse the ModelFacts of a `deepseek_v4` config, in the form of releases or of transformers.
    Raises CheckpointError for fields that are missing or impossible."""
    for name, usual in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("n_shared_experts", 1),
    ):
        fields.refuse(
            config, name, unless=usual, why="no release has it, so miles could not verify it"
        )
    for name, usual in (
        ("norm_topk_prob", True),
        ("num_key_value_heads", 1),
        ("topk_method", "noaux_tc"),
    ):
        fields.refuse(
            config, name, unless=usual, why="transformers computes this family in only one way"
        )
    num_layers = fields.number(config, "num_hidden_layers", kind=int)
    rates = _rates(config)
    num_experts = fields.number(config, "n_routed_experts", kind=int)
    expert_size = fields.number(config, "moe_intermediate_size", kind=int)
    head_dim = fields.number(config, "head_dim", default=512, kind=int)
    rope_head_dim = _rope_head_dim(config, head_dim=head_dim)
    return ModelFacts(
        family="deepseek_v4",
        num_layers=num_layers,
        layers=_layers(config, num_layers=num_layers, rates=rates),
        hidden_size=fields.number(config, "hidden_size", kind=int),
        num_heads=fields.number(config, "num_attention_heads", kind=int),
        num_kv_heads=1,
        head_dim=head_dim,
        ffn_hidden_size=0,
        vocab_size=fields.number(config, "vocab_size", kind=int),
        tied_embeddings=fields.number(config, "tie_word_embeddings", default=False, kind=bool),
        rope=_rope(config, "compress", share=rope_head_dim / head_dim),
        rope_sliding=_rope(config, "main", share=rope_head_dim / head_dim),
        norm_eps=fields.number(config, "rms_norm_eps", default=1e-6, kind=float),
        max_position_embeddings=fields.number(
            config, "max_position_embeddings", default=1_048_576, kind=int
        ),
        qk_norm=False,
        qkv_bias=False,
        attention_sinks=True,
        sliding_window=fields.number(config, "sliding_window", default=128, kind=int),
        indexer=Indexer(
            num_heads=fields.number(config, "index_n_heads", default=64, kind=int),
            head_dim=fields.number(config, "index_head_dim", default=128, kind=int),
            topk=fields.number(config, "index_topk", default=512, kind=int),
            rope_interleaved=True,
        ),
        compressed=Compressed(
            q_lora_rank=fields.number(config, "q_lora_rank", kind=int),
            sparse_rate=rates[_SPARSE],
            heavy_rate=rates[_HEAVY],
            output_groups=_output_groups(config),
            output_rank=fields.number(config, "o_lora_rank", default=1024, kind=int),
            rope_head_dim=rope_head_dim,
        ),
        hyper=HyperConnections(
            num_streams=fields.number(config, "hc_mult", default=4, kind=int),
            sinkhorn_rounds=fields.number(config, "hc_sinkhorn_iters", default=20, kind=int),
            eps=fields.number(config, "hc_eps", default=1e-6, kind=float),
        ),
        activation_limit=fields.number(config, "swiglu_limit", default=10.0, kind=float),
        num_experts=num_experts,
        topk=fields.topk(config, "num_experts_per_tok", num_experts=num_experts),
        moe_ffn_hidden_size=expert_size,
        shared_expert_ffn_hidden_size=expert_size,
        normalize_topk=True,
        router_score=_score(config),
        router_bias=True,
        router_scaling=fields.number(config, "routed_scaling_factor", default=1.5, kind=float),
        num_mtp_layers=fields.number(config, "num_nextn_predict_layers", default=1, kind=int),
        dtype=fields.dtype(config),
        eos_token_ids=fields.eos_token_ids(config),
    )


def _score(config: Mapping[str, object]):
    function = config.get("scoring_func", "sqrtsoftplus")
    if function not in ("sqrtsoftplus", "softmax", "sigmoid"):
        raise fields.unusable_field(
            "scoring_func", why=f"`{function}` is none of sqrtsoftplus, softmax, sigmoid"
        )
    return function


def _output_groups(config: Mapping[str, object]) -> int:
    groups = fields.number(config, "o_groups", default=8, kind=int)
    heads = fields.number(config, "num_attention_heads", kind=int)
    if groups < 1 or heads % groups:
        raise fields.unusable_field(
            "o_groups", why=f"{heads} heads cannot be cut into {groups} groups"
        )
    return groups


def _rates(config: Mapping[str, object]) -> dict[str, int]:
    """Return the number of positions per entry, by kind of layer."""
    rates = {_SPARSE: 4, _HEAVY: 128, **cast("dict[str, int]", config.get("compress_rates") or {})}
    for name, kind in (("compress_rate_csa", _SPARSE), ("compress_rate_hca", _HEAVY)):
        rates[kind] = fields.number(config, name, default=rates[kind], kind=int)
        if rates[kind] < 1:
            raise fields.unusable_field(
                "compress_rates", why=f"{rates[kind]} positions make no entry"
            )
    return rates


def _layers(
    config: Mapping[str, object], *, num_layers: int, rates: Mapping[str, int]
) -> tuple[Layer, ...]:
    """Return the layers with their kind and routing, from `layer_types` and `mlp_layer_types`
    (transformers) or `compress_ratios` and `num_hash_layers` (releases)."""
    kinds, ratios = config.get("layer_types"), config.get("compress_ratios")
    if kinds is None:
        # the last ratio of the releases is of the multi-token-prediction layer
        by_ratio = {0: "sliding_attention", 4: _SPARSE, 128: _HEAVY}
        if not isinstance(ratios, list):
            raise fields.unusable_field(
                "compress_ratios",
                why="neither it nor `layer_types` describes the attention of the layers",
            )
        kinds = [by_ratio.get(ratio, ratio) for ratio in ratios]
    hashed = config.get("mlp_layer_types")
    if hashed is None:
        first = fields.number(config, "num_hash_layers", default=3, kind=int)
        hashed = ["hash_moe" if layer < first else "moe" for layer in range(num_layers)]
    for name, words, known in (
        ("layer_types", kinds, _COMPRESSIONS),
        ("mlp_layer_types", hashed, ("hash_moe", "moe")),
    ):
        if (
            not isinstance(words, list)
            or len(words) < num_layers
            or (strange := [word for word in words if word not in known])
        ):
            why = f"{num_layers} layers need as many of {', '.join(known)}, and it is {words!r}"
            raise fields.unusable_field(
                name,
                why=why
                if not isinstance(words, list) or len(words) < num_layers
                else f"it has `{strange[0]}`",
            )
    return tuple(
        Layer(
            mixer="compressed",
            mlp="moe",
            compression=_COMPRESSIONS[kind],
            hash_routing=routing == "hash_moe",
        )
        for kind, routing in zip(kinds[:num_layers], hashed[:num_layers], strict=True)
    )


def _rope_head_dim(config: Mapping[str, object], *, head_dim: int) -> int:
    share = fields.number(config, "partial_rotary_factor", default=64 / 512, kind=float)
    return fields.number(config, "qk_rope_head_dim", default=int(head_dim * share), kind=int)


def _rope(config: Mapping[str, object], kind: str, *, share: float) -> Rope:
    """Return the rotary embedding of a kind of layer: `main` for layers that see only their window,
    `compress` for the others."""
    nested = config.get("rope_parameters")
    if isinstance(nested, Mapping) and kind in nested:
        return fields.rope(config, layer_type=kind, share=share, interleaved=True)
    if kind == "main":
        own = {"rope_theta": config.get("rope_theta", 10_000.0)}
    else:
        own = {**config, "rope_theta": config.get("compress_rope_theta", 160_000.0)}
    return fields.rope(own, share=share, interleaved=True)
