"""Holds rules that many families share: embedding, norms, grouped attention, gated MLP, experts. A
family file picks from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from milescli.models.base import (
    COLUMN,
    EXPERT_COLUMN,
    EXPERT_ROW,
    ROW,
    VOCABULARY,
    Rule,
    Where,
    dense_layers,
    every_layer,
    moe_layers,
)
from milescli.models.tensor_rules import (
    Size,
    expert_ffn,
    ffn,
    hidden,
    num_experts,
    queries,
    shared_ffn,
    tensor_rule,
    vocabulary,
)
from milescli.models.transforms import (
    concatenate,
    fuse_qkv,
    halve,
    join_parts,
    shapes,
    split_halves,
    split_qkv,
)

_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."
MTP = "mtp.layers.{mtp}."

EMBEDDING = tensor_rule(
    "model.embed_tokens.weight",
    "embedding.word_embeddings.weight",
    vocabulary,
    hidden,
    sharding=VOCABULARY,
    block="outside",
)
OUTPUT_LAYER = tensor_rule(
    "lm_head.weight",
    "output_layer.weight",
    vocabulary,
    hidden,
    sharding=VOCABULARY,
    block="outside",
)
FINAL_NORM = tensor_rule(
    "model.norm.weight", "decoder.final_layernorm.weight", hidden, block="outside"
)


def norm(hf: str, megatron: str, *, per_head: bool = False, where: Where = every_layer) -> Rule:
    """Return the rule of a layer's norm weight; with `per_head`, its length is head_dim instead of
    hidden_size."""
    size = (lambda f: f.head_dim) if per_head else hidden
    return tensor_rule(_HF + hf, _MEGATRON + megatron, size, where=where)


def prefixed(rules: tuple[Rule, ...], prefix: str) -> tuple[Rule, ...]:
    """Return the rules with `prefix` in place of `model.` in their names on disk."""
    return tuple(
        replace(
            rule,
            hf=tuple(
                prefix + name.removeprefix("model.") if name.startswith("model.") else name
                for name in rule.hf
            ),
            alternatives=prefixed(rule.alternatives, prefix),
        )
        for rule in rules
    )


def renamed(rules: tuple[Rule, ...], names: Mapping[str, str]) -> tuple[Rule, ...]:
    """Return the rules with parts of their names on disk replaced, in the order of `names`;
    alternatives keep their names."""

    def new(name: str) -> str:
        for part, own in names.items():
            name = name.replace(part, own)
        return name

    return tuple(replace(rule, hf=tuple(map(new, rule.hf))) for rule in rules)


def in_mtp(rules: tuple[Rule, ...], *, hf: str = _HF) -> tuple[Rule, ...]:
    """Return the rules of a decoder layer as part of a multi-token-prediction layer. `hf` is the
    prefix of its names on disk, with {layer} (num_layers + number) or {mtp} (number)."""
    return tuple(
        replace(
            rule,
            hf=tuple(hf + name.removeprefix(_HF) for name in rule.hf),
            megatron=MTP + "transformer_layer." + rule.megatron.removeprefix(_MEGATRON),
            block="mtp",
            alternatives=in_mtp(rule.alternatives, hf=hf),
        )
        for rule in rules
    )


INPUT_NORM = norm("input_layernorm.weight", "input_layernorm.weight")
MLP_NORM = norm("post_attention_layernorm.weight", "pre_mlp_layernorm.weight")
QUERY_NORM = norm("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", per_head=True)
KEY_NORM = norm("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", per_head=True)
QUERY_NORM_OVER_HEADS = replace(
    QUERY_NORM, shapes=shapes(lambda f: (f.num_heads * f.head_dim,)), sharding=COLUMN
)
KEY_NORM_OVER_HEADS = replace(
    KEY_NORM, shapes=shapes(lambda f: (f.num_kv_heads * f.head_dim,)), sharding=COLUMN
)

QKV = Rule(
    hf=(
        _HF + "self_attn.q_proj.weight",
        _HF + "self_attn.k_proj.weight",
        _HF + "self_attn.v_proj.weight",
    ),
    megatron=_MEGATRON + "self_attention.linear_qkv.weight",
    shapes=shapes(
        lambda f: (f.num_heads * f.head_dim, f.hidden_size),
        lambda f: (f.num_kv_heads * f.head_dim, f.hidden_size),
        lambda f: (f.num_kv_heads * f.head_dim, f.hidden_size),
    ),
    sharding=COLUMN,
    fuse=fuse_qkv,
    split=split_qkv,
)
QKV_BIAS = Rule(
    hf=(
        _HF + "self_attn.q_proj.bias",
        _HF + "self_attn.k_proj.bias",
        _HF + "self_attn.v_proj.bias",
    ),
    megatron=_MEGATRON + "self_attention.linear_qkv.bias",
    shapes=shapes(
        lambda f: (f.num_heads * f.head_dim,),
        lambda f: (f.num_kv_heads * f.head_dim,),
        lambda f: (f.num_kv_heads * f.head_dim,),
    ),
    sharding=COLUMN,
    fuse=fuse_qkv,
    split=split_qkv,
)
ATTENTION_OUTPUT = tensor_rule(
    _HF + "self_attn.o_proj.weight",
    _MEGATRON + "self_attention.linear_proj.weight",
    hidden,
    queries,
    sharding=ROW,
)
ATTENTION_OUTPUT_BIAS = tensor_rule(
    _HF + "self_attn.o_proj.bias", _MEGATRON + "self_attention.linear_proj.bias", hidden
)

MLP_UP = tensor_rule(
    (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
    _MEGATRON + "mlp.linear_fc1.weight",
    ffn,
    hidden,
    sharding=COLUMN,
    where=dense_layers,
)
MLP_DOWN = tensor_rule(
    _HF + "mlp.down_proj.weight",
    _MEGATRON + "mlp.linear_fc2.weight",
    hidden,
    ffn,
    sharding=ROW,
    where=dense_layers,
)
MLP_UP_BIAS = tensor_rule(
    (_HF + "mlp.gate_proj.bias", _HF + "mlp.up_proj.bias"),
    _MEGATRON + "mlp.linear_fc1.bias",
    ffn,
    sharding=COLUMN,
    where=dense_layers,
)
MLP_DOWN_BIAS = tensor_rule(
    _HF + "mlp.down_proj.bias", _MEGATRON + "mlp.linear_fc2.bias", hidden, where=dense_layers
)
FUSED_MLP_UP = Rule(
    hf=(_HF + "mlp.gate_up_proj.weight",),
    megatron=_MEGATRON + "mlp.linear_fc1.weight",
    shapes=shapes(lambda f: (2 * f.ffn_hidden_size, f.hidden_size)),
    sharding=COLUMN,
    fuse=concatenate,
    split=halve,
    where=dense_layers,
    unpack=split_halves,
    pack=join_parts,
)

ROUTER = tensor_rule(
    _HF + "mlp.gate.weight", _MEGATRON + "mlp.router.weight", num_experts, hidden, where=moe_layers
)
_STACKED_UP = Rule(
    hf=(_HF + "mlp.experts.gate_up_proj",),
    megatron=_MEGATRON + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
    shapes=shapes(lambda f: (2 * f.moe_ffn_hidden_size, f.hidden_size)),
    sharding=EXPERT_COLUMN,
    fuse=concatenate,
    split=halve,
    where=moe_layers,
    stacked=True,
    unpack=split_halves,
    pack=join_parts,
)
_STACKED_DOWN = tensor_rule(
    _HF + "mlp.experts.down_proj",
    _MEGATRON + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
    hidden,
    expert_ffn,
    sharding=EXPERT_ROW,
    where=moe_layers,
    stacked=True,
)
EXPERT_UP = tensor_rule(
    (_HF + "mlp.experts.{expert}.gate_proj.weight", _HF + "mlp.experts.{expert}.up_proj.weight"),
    _STACKED_UP.megatron,
    expert_ffn,
    hidden,
    sharding=EXPERT_COLUMN,
    where=moe_layers,
    alternatives=(_STACKED_UP,),
)
EXPERT_DOWN = replace(
    _STACKED_DOWN,
    hf=(_HF + "mlp.experts.{expert}.down_proj.weight",),
    stacked=False,
    alternatives=(_STACKED_DOWN,),
)

ROUTER_BIAS = tensor_rule(
    _HF + "mlp.gate.e_score_correction_bias",
    _MEGATRON + "mlp.router.expert_bias",
    num_experts,
    where=moe_layers,
    buffer=True,
    float32=True,
)


def shared_experts(hf: str = "mlp.shared_experts.") -> tuple[Rule, Rule]:
    """Return the rules of the experts that every token uses, concatenated into one gated MLP. `hf`
    is the prefix of their names on disk within a layer."""
    up = tensor_rule(
        (_HF + hf + "gate_proj.weight", _HF + hf + "up_proj.weight"),
        _MEGATRON + "mlp.shared_experts.linear_fc1.weight",
        shared_ffn,
        hidden,
        sharding=COLUMN,
        where=moe_layers,
    )
    down = tensor_rule(
        _HF + hf + "down_proj.weight",
        _MEGATRON + "mlp.shared_experts.linear_fc2.weight",
        hidden,
        shared_ffn,
        sharding=ROW,
        where=moe_layers,
    )
    return up, down


SHARED_UP, SHARED_DOWN = shared_experts()
SHARED_GATE = tensor_rule(
    _HF + "mlp.shared_expert_gate.weight",
    _MEGATRON + "mlp.shared_experts.gate_weight",
    lambda f: 1,
    hidden,
    where=moe_layers,
)


def mtp_part(hf: str, megatron: str, *dims: Size, **others: Any) -> Rule:
    """Return the rule of a tensor outside the decoder layer of a multi-token-prediction layer. `hf`
    is its whole name, `megatron` its name within that layer; the other arguments are those of
    `tensor_rule`."""
    return tensor_rule(hf, MTP + megatron, *dims, block="mtp", **others)


MTP_FRAME = (
    mtp_part(_HF + "enorm.weight", "enorm.weight", hidden),
    mtp_part(_HF + "hnorm.weight", "hnorm.weight", hidden),
    mtp_part(
        _HF + "eh_proj.weight",
        "eh_proj.weight",
        hidden,
        lambda f: 2 * f.hidden_size,
        sharding=COLUMN,
    ),
    mtp_part(_HF + "shared_head.norm.weight", "final_layernorm.weight", hidden),
    *(
        mtp_part(_HF + hf, megatron, vocabulary, hidden, sharding=VOCABULARY, optional=True)
        for hf, megatron in (
            ("embed_tokens.weight", "embedding.word_embeddings.weight"),
            ("shared_head.head.weight", "output_layer.weight"),
        )
    ),
)
"""Rules around the decoder layer in a multi-token-prediction layer (arXiv 2412.19437, section 2.2),
with DeepSeek's names, which GLM uses too: norms, the projection of embedding and hidden state, the
norm after the layer, and the copies of embedding and output layer that some releases hold.
Megatron's module shares the latter two with the model; the copies get their own names, so that
converting back gives the same folder."""
